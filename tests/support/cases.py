"""Small models, each with its data, its loss, and how it is split; built alike on every rank from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.models import (
    GPT,
    MLP,
    Backwards,
    Frozen,
    Messenger,
    Normed,
    Regularised,
    Siamese,
    ThereAndBack,
    Translator,
    UNet,
    ViT,
    WithSquash,
)
from torch import Tensor, nn

__all__ = ["CASES", "Case", "next_token", "tokens"]

Batch = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its data, its loss, and plans for several numbers of ranks."""

    name: str
    build: Callable[[], nn.Module]
    batches: Callable[[], list[list[Batch]]]
    """Steps, each a list of micro-batches."""
    loss: Callable[[nn.Module, Batch], Tensor]
    plans: dict[str, Callable[[int], Any]] = field(default_factory=dict)
    """Further plans by name, for a number of ranks."""
    most_stages: int = 4
    """How many stages the model has parameters for: beyond, there is no automatic plan."""


# Data.


def data(*shapes: tuple[int, ...], steps: int = 3, micro_batches: int = 4, classes: int = 0) -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(7)
    made: list[list[Batch]] = []
    for _ in range(steps):
        step: list[Batch] = []
        for _ in range(micro_batches):
            parts = [torch.randn(shape, generator=generator) for shape in shapes]
            if classes:
                parts.append(torch.randint(classes, shapes[0][:1], generator=generator))
            step.append(tuple(parts))
        made.append(step)
    return made


def tokens(vocab: int, sizes: list[tuple[int, int]], steps: int = 3) -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(8)
    return [
        [
            (
                torch.randint(vocab, (batch, length), generator=generator),
                torch.randint(vocab, (batch, length), generator=generator),
            )
            for batch, length in sizes
        ]
        for _ in range(steps)
    ]


# Losses.


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits.view(-1, logits.size(-1)), batch[1].reshape(-1))


def square(model: nn.Module, batch: Batch) -> Tensor:
    return model(*batch).square().mean()


def translate(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0], batch[1])
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def contrast(model: nn.Module, batch: Batch) -> Tensor:
    a, b = model(batch[0]), model(batch[1])
    return (a - b).pow(2).sum(1).sqrt().mean() + F.relu(1.0 - (a - b.flip(0)).pow(2).sum(1)).mean()


# Plans.


def alternating(prefix: str, count: int, ends: dict[str, int] | None = None) -> Callable[[int], dict[str, str]]:
    """Blocks dealt out like cards: the stages are not contiguous."""

    def plan(num_ranks: int) -> dict[str, str]:
        placed = {f"{prefix}.{number}": f"rank:{number % num_ranks}" for number in range(count)}
        for name, rank in (ends or {}).items():
            placed[name] = f"rank:{rank % num_ranks}"
        return placed

    return plan


def tied_ends(same: bool) -> Callable[[int], dict[str, str]]:
    def plan(num_ranks: int) -> dict[str, str]:
        placed = {f"blocks.{number}": f"rank:{number * num_ranks // 4}" for number in range(4)}
        last = 0 if same else num_ranks - 1
        return {"embed": "rank:0", "position": "rank:0", **placed, "norm": f"rank:{last}", "head": f"rank:{last}"}

    return plan


def unet_plan(num_ranks: int) -> dict[str, str]:
    order = ["down.0", "down.1", "down.2", "middle", "up.0", "up.1", "up.2"]
    return {name: f"rank:{number * num_ranks // 7}" for number, name in enumerate(order)}


def squash_plan(num_ranks: int) -> dict[str, str]:
    if num_ranks == 1:
        return {"first": "rank:0", "squash": "rank:0", "last": "rank:0"}
    if num_ranks == 2:
        return {"first": "rank:0", "squash": "rank:1", "last": "rank:0"}
    plan = {"first": "rank:0", "squash": "rank:1", "last": f"rank:{min(2, num_ranks - 1)}"}
    return plan if num_ranks < 4 else {**plan, "last.bias": "rank:3"}


def _cases() -> Iterator[Case]:
    short = lambda: data((6, 10))  # noqa: E731
    lm = lambda: tokens(17, [(2, 8)] * 4)  # noqa: E731
    yield Case(
        name="mlp",
        build=MLP,
        batches=lambda: data((6, 12), classes=5),
        loss=classify,
        plans={"dealt": alternating("layers", 6, {"head": 0})},
    )
    yield Case(
        name="gpt",
        build=GPT,
        batches=lm,
        loss=next_token,
        plans={"dealt": alternating("blocks", 4, {"embed": 1, "position": 0, "norm": 0, "head": 1})},
    )
    yield Case(
        name="gpt_tied",
        build=lambda: GPT(tied=True),
        batches=lm,
        loss=next_token,
        plans={"same": tied_ends(True), "different": tied_ends(False)},
    )
    yield Case(name="unet", build=UNet, batches=lambda: data((2, 3, 16, 16)), loss=square, plans={"thirds": unet_plan})
    yield Case(
        name="encoder_decoder",
        build=Translator,
        batches=lambda: [[(a % 11, b % 11) for a, b in step] for step in tokens(11, [(2, 6)] * 4)],
        loss=translate,
    )
    yield Case(name="siamese", build=Siamese, batches=lambda: data((6, 10), (6, 10)), loss=contrast)
    yield Case(name="cls_token", build=ViT, batches=lambda: data((4, 4, 8), classes=5), loss=classify)
    yield Case(
        name="there_and_back", build=ThereAndBack, batches=short, loss=square, plans={"dealt": alternating("layers", 4)}
    )
    yield Case(name="backwards", build=Backwards, batches=short, loss=square)
    yield Case(
        name="varying_sizes",
        build=lambda: GPT(blocks=2),
        batches=lambda: tokens(17, [(2, 8), (1, 5), (3, 8), (2, 12), (1, 1)]),
        loss=next_token,
    )
    yield Case(
        name="no_parameters", build=WithSquash, batches=short, loss=square, plans={"squash": squash_plan}, most_stages=2
    )
    yield Case(name="frozen", build=Frozen, batches=short, loss=square)
    yield Case(name="structures", build=Messenger, batches=short, loss=square)
    yield Case(
        name="features_used_again",
        build=Regularised,
        batches=lambda: data((6, 10)),
        loss=square,
        plans={"dealt": alternating("layers", 4, {"first": 0})},
    )
    yield Case(name="batchnorm", build=Normed, batches=lambda: data((3, 3, 6, 6)), loss=square)


CASES = {case.name: case for case in _cases()}

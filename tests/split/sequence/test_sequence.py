"""Sums that are divided along the sequence: norms, dropout and residuals of each position on one of the ranks."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from tests.wide.test_loops import largest_difference, same
from torch import Tensor, nn

import farspan
from farspan.execute.process.world import current_engine
from farspan.place.mesh.tensor import said_of

HEADS = 4


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Block(nn.Module):
    def __init__(self, norm: Any, p: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(16), norm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.drop(self.out(found))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Net(nn.Module):
    def __init__(self, norm: Any = nn.LayerNorm, p: float = 0.0, blocks: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(17, 16), nn.Parameter(torch.randn(1, 16, 16) * 0.1)
        self.blocks = nn.ModuleList([Block(norm, p) for _ in range(blocks)])
        self.norm, self.head = norm(16), nn.Linear(16, 17)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[:, : ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Flat(Net):
    """Between blocks what is divided becomes one dimension with the batch, is turned over, and is added up."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            x = x + torch.tanh(x.reshape(-1, 16)).view(x.shape).flip(1).cumsum(1) * 0.1 + x.mean(1, keepdim=True)
            y = x * 2
            y[:, 0] = 1
            y.mul_(0.5)
            x = x + y
        return self.head(self.norm(x))


def train(model: Any, length: int) -> Any:
    words = torch.randint(17, (2, length + 1), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(5)
    found: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        losses: list[Any] = []
        for number in range(2):
            ids = (words + number + step) % 17
            losses.append(F.cross_entropy(model(ids[:, :-1]).view(-1, 17), ids[:, 1:].reshape(-1)) / 2)
            losses[-1].backward()
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        found += [loss.item() for loss in losses]
    model.eval()
    with torch.no_grad():
        found.append(model(words[:, :1]).sum().item())
    return found, {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def run(make: Any, num_ranks: int = 2, length: int = 6, **options: Any) -> tuple[Any, list[Any], list[Any]]:
    """Returns what one process gives, what each rank does, and how the matrices are split."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make().double()
        wanted = train(copy.deepcopy(model), length)
        models = [copy.deepcopy(model) for _ in range(num_ranks)]

        def on_rank(rank: int) -> Any:
            model = farspan.distribute(models[rank], **options)
            engine = current_engine()
            assert engine is not None
            matrices = engine.recorder.splitting.matrices
            forms: list[Any] = []
            engine.after_step.append(
                lambda: forms.append(
                    ({name: matrices.form_of(name)[0] for name, _ in model.named_parameters()}, matrices.gathered_for)
                )
            )
            return train(model, length), forms[0]

        found = run_threads(num_ranks, on_rank)
    return wanted, [item for item, _ in found], [form for _, form in found]


ALL: dict[str, Any] = {"tensor_parallel": {"degree": 2, "*": "sequence"}}
THREE: dict[str, Any] = {"tensor_parallel": {"degree": 3, "blocks": "sequence"}}


NETS = {
    "norms": Net,
    "rms": functools.partial(Net, RMSNorm),
    "rms_of_torch": functools.partial(Net, functools.partial(nn.RMSNorm, eps=1e-6)),
    "dropout": functools.partial(Net, p=0.3),
    "flat": Flat,
}


@pytest.mark.parametrize(("name", "length"), list(itertools.product(list(NETS), [7, 6])))
def test_one_process_within_rounding(name: str, length: int) -> None:
    make = NETS[name]
    wanted, found, forms = run(make, length=length, **ALL)
    assert all(same(item, found[0]) for item in found), "all ranks see the same"
    assert largest_difference(found[0], wanted) < 1e-9
    if length == 7:
        assert same(run(make, length=length, **ALL)[1], found), "to the last bit"
    for form, gathered_for in forms:
        assert {name for name, each in form.items() if each == "sequence"} == {
            f"blocks.{number}.{name}.weight" for number in range(2) for name in ("out", "down")
        }
        assert bool(gathered_for) == (make is Flat)


@pytest.mark.parametrize(
    ("num_ranks", "length", "options"),
    [
        (3, 7, THREE),
        (4, 5, ALL),
        (2, 6, ALL | {"remat": True}),
        (2, 6, ALL | {"micro_batches": 2}),
        (2, 6, {"tensor_parallel": {"blocks.0": "sequence", "head": "vocab"}}),
        (3, 6, {"plan": {"*": "rank:0&rank:1", "blocks.1": "rank:2", "head": "rank:2"}}),
    ],
    ids=["three", "stages", "remat", "lanes", "one_block", "one_rank_behind"],
)
def test_with_everything_else(num_ranks: int, length: int, options: dict[str, Any]) -> None:
    if "plan" in options:
        options = options | {"tensor_parallel": {"blocks.0": "sequence"}}
    make = functools.partial(Net, p=0.3 if "micro_batches" not in options else 0.0)
    wanted, found, forms = run(make, num_ranks, length, **options)
    assert all(same(item, found[0]) for item in found), "all ranks see the same"
    assert largest_difference(found[0], wanted) < 1e-9
    if num_ranks > 2:
        assert same(run(make, num_ranks, length, **options)[1], found), "to the last bit"
    assert all("sequence" in form.values() for form, _ in forms)


def test_what_is_done_with_positions() -> None:
    """Behind the first sum: norms, dropout and residuals of half of the positions on each rank, and no sum of all."""

    def on_rank(rank: int) -> Any:
        model = farspan.distribute(Net(p=0.1), **ALL)
        engine = current_engine()
        assert engine is not None
        for _ in range(2):
            model(torch.zeros(2, 6, dtype=torch.long)).sum().backward()
        graph = engine.recorder.pending[1]
        found: dict[str, set[tuple[int, ...]]] = {}
        for call in graph.calls[len(graph.calls) // 3 :]:
            found.setdefault(call.entry.name.split(".")[-1], set()).update(meta.shape for meta in call.entry.metas)
        farspan.flush()
        return {name: shapes for name, shapes in found.items() if name in ("layer_norm", "_kept", "add")}

    for found in run_threads(2, on_rank):
        assert found == {"layer_norm": {(2, 3, 16)}, "_kept": {(2, 3, 16)}, "add": {(2, 3, 16)}}


def test_one_position_is_not_divided_and_that_is_said() -> None:
    def on_rank(rank: int) -> str:
        model = farspan.distribute(Net(), **ALL)
        engine, said = current_engine(), []
        assert engine is not None
        engine.console.say = engine.console.warn = said.append  # type: ignore[method-assign]
        for _ in range(2):
            model(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return " ".join(said)

    for said in run_threads(2, on_rank):
        assert "4 by rows" in said
        assert "blocks.0.out.weight is not split as asked (sequence): its sums have fewer positions" in said


def test_what_is_said() -> None:
    forms = {"a": ("column", ""), "b": ("sequence", ""), "c": ("row", "")}
    assert said_of(forms) == (
        "tensor axis: 1 matrices split by columns, 2 by rows (sums of 1 divided along the sequence)"
    )
    assert said_of({"b": ("sequence", "")}, {"view", "flip"}).endswith(
        "1 by rows (sums of 1 divided along the sequence, gathered for flip, view)"
    )

"""Models of many families, built as ever and without data: the same bits, whoever makes which part."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from benchmarks.coverage.configs import WAYS, tiny_config
from benchmarks.coverage.families import family_names
from benchmarks.coverage.plain_torch import CASES
from torch import nn

__all__ = ["build", "chosen", "compare", "digest_of"]

MAX_PARAMETERS = 30_000_000
STRIDE = 7


def chosen(count: int) -> list[str]:
    """Families spread over the alphabet, plain torch modules among them."""
    names = sorted(family_names())
    spread = [name for begin in range(STRIDE) for name in names[begin::STRIDE]]
    return spread[:count]


def build(name: str) -> nn.Module:
    """A small model of a family; an exception where its configuration cannot be made small."""
    if name.startswith("torch."):
        return CASES[name.removeprefix("torch.")].build()
    configs: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    last: Exception = ValueError(f"{name} is not small in any way")
    for way in WAYS:
        for class_name in family_names()[name][:2]:
            cls = getattr(importlib.import_module("transformers"), class_name)
            number = 0
            with contextlib.suppress(Exception), torch.device("meta"):
                config = tiny_config(configs.CONFIG_MAPPING[name], way)
                number = sum(item.numel() for item in cls(config).parameters())
            if number <= MAX_PARAMETERS:
                try:
                    return cls(tiny_config(configs.CONFIG_MAPPING[name], way))
                except Exception as error:
                    last = error
    raise last


def compare(name: str, num_ranks: int) -> str:
    """What differs if each of some ranks makes its part of a model; "" for nothing."""
    import farspan
    from farspan.place.deferred.construction import CONSTRUCTION
    from farspan.place.deferred.models import fill_tensor, open_model

    with _filled_with_nan():
        _seed()
        plain = build(name)
        wanted, after = _state(plain), _generators()
        for rank in range(num_ranks):
            _seed()
            with farspan.deferred_init():
                model = build(name)
            if _generators() != after:
                return "the generators"
            open_model(model)
            found = _state(model)
            if [key for key, _ in found] != [key for key, _ in wanted]:
                return "names"
            if _ties(found) != _ties(wanted):
                return "which are tied"
            pairs = zip(_share(found, rank, num_ranks), _share(wanted, rank, num_ranks), strict=True)
            for (key, item), (_, other) in pairs:
                fill_tensor(item)
                form = (type(item), item.dtype, item.stride(), item.requires_grad)
                if form != (type(other), other.dtype, other.stride(), other.requires_grad) or not _is_same(item, other):
                    return key
            del model, found
            CONSTRUCTION.end()
    return ""


def digest_of(tensors: Any) -> str:
    """Of the bits of tensors, in their order."""
    digest = hashlib.sha256()
    for item in tensors:
        digest.update(item.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def _generators() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), random.getstate()


@contextlib.contextmanager
def _filled_with_nan() -> Iterator[None]:
    """What a constructor leaves as it finds it is not a number: else it could not be compared."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    names = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, item) for name, item in names]


def _ties(state: list[tuple[str, torch.Tensor]]) -> list[int]:
    """For each tensor the place of the first that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(item), place) for place, (_, item) in enumerate(state)]


def _share(state: list[tuple[str, torch.Tensor]], rank: int, num_ranks: int) -> list[tuple[str, torch.Tensor]]:
    """A stretch of the model."""
    return state[rank * len(state) // num_ranks : (rank + 1) * len(state) // num_ranks]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return digest_of([one]) == digest_of([other])

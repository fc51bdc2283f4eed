"""Calls that differ in numbers only: what is foreseen for them without a run is what a run gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from farspan.lazy.metadata import MetadataCache, Unknown, current_modes, flatten_arguments, meta_of


def windowed(x: torch.Tensor, count: int) -> Any:
    """Goes three ways, by a size and by a counter."""
    if x.shape[0] > 6:
        x = x[-6:]
    return torch.cat([x, x[:1]]) if count % 2 else x.reshape(-1)


def counted(x: torch.Tensor, count: int) -> Any:
    """Returns what it has counted beside a transposed tensor."""
    return x.t(), {"count": count + 1, "rows": x.shape[0] * 2}


def particular(x: torch.Tensor, count: int) -> Any:
    """Not the same for what only looks like a number."""
    return x.sum(0) if isinstance(count, int) else x


def enumerated(x: torch.Tensor, count: int) -> Any:
    """A loop over its number: each is a way of its own."""
    for _ in range(count):
        x = torch.cat([x, x[:1]])
    return x


@pytest.mark.parametrize("function", [windowed, counted, particular, enumerated])
@pytest.mark.parametrize(
    "makes", [torch.empty, lambda *size: torch.empty(*size[::-1]).t(), lambda a, b: torch.empty(a, 9)[:, :b]]
)
def test_foreseen_is_what_a_run_gives(function: Callable[..., Any], makes: Callable[..., torch.Tensor]) -> None:
    cache = MetadataCache(lambda function, *args: function(*args), ())
    for number in range(2, 22):
        x = makes(number, 3)
        template, tensors = flatten_arguments((x, number), {})
        given = (function, template, [meta_of(tensor) for tensor in tensors], current_modes())
        alone = MetadataCache(lambda function, *args: function(*args), ()).lookup(*given)
        found = cache.lookup(*given)
        assert not isinstance(found, Unknown) and not isinstance(alone, Unknown)
        assert found.template == alone.template and found.metas == alone.metas
        assert (found.same_as, found.shares, found.unused) == (alone.same_as, alone.shares, alone.unused)
    if function in (windowed, counted):
        assert cache.num_runs < 18, "each size was run"

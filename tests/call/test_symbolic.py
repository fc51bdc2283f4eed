"""Calls that differ in numbers only: what is foreseen for them without a run is what a run gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import farspan
from farspan.call.infer import entry as known
from farspan.call.infer import fallbacks
from farspan.call.infer.entry import Unknown, meta_of
from farspan.call.infer.fallbacks import MetadataCache
from farspan.call.leaf import Leaf
from farspan.call.modes import current_modes
from farspan.call.pytree.template import flatten_arguments
from farspan.execute.process.world import current_engine


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


def multiplied(x: torch.Tensor, count: int) -> Any:
    """Counts operations, which follow from its sizes."""
    return x @ x.t() + count


def enumerated(x: torch.Tensor, count: int) -> Any:
    """A loop over its number: each is a way of its own."""
    for _ in range(count):
        x = torch.cat([x, x[:1]])
    return x


@pytest.mark.parametrize("function", [windowed, counted, multiplied, particular, enumerated])
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
        assert found.flops == alone.flops
        assert (found.same_as, found.shares, found.unused) == (alone.same_as, alone.shares, alone.unused)
    if function in (windowed, counted, multiplied):
        assert cache.num_runs < 18, "each size was run"


class Attention(nn.Module):
    """What a block of a transformer does with sizes: products, views, a mask, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, width = x.shape
        q, k, v = (part.view(size, length, 2, width // 2).transpose(1, 2) for part in self.qkv(x).split(width, 2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(self.out(y.transpose(1, 2).reshape(size, length, width)))


def test_the_third_size_of_a_module_is_known_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    lookup = fallbacks._find_out

    def counted(target: Any, *args: Any) -> Any:
        if type(target) is Leaf:
            runs.append(target.name)
        return lookup(target, *args)

    monkeypatch.setattr(fallbacks, "_find_out", counted)
    sizes = [(2, 5), (3, 7), (4, 9), (6, 6), (5, 12), (2, 17)]

    def trained(model: nn.Module) -> list[float]:
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses: list[float] = []
        for size, length in sizes:
            optimizer.zero_grad()
            loss = model(torch.randn(size, length, 8)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    wanted = trained(nn.Sequential(Attention(), Attention()))
    torch.manual_seed(0)
    assert trained(farspan.distribute(nn.Sequential(Attention(), Attention()))) == wanted
    assert runs and max(Counter(runs).values()) <= 2, runs


def test_calls_of_ever_new_sizes_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_FEW", 8)
    monkeypatch.setattr(known, "_FLUSHES", 4)
    model = farspan.distribute(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    engine = current_engine()
    assert engine is not None
    cache = engine.recorder.cache
    cache.known, cache.entries = known.Recent(), known.Recent()
    for size in range(2, 60):
        for of in (size, 1):  # what is used again and again stays
            loss = (model(torch.randn(of, 3)) + torch.ones(of, 1)).square().mean()
            loss.backward()
            loss.item()
        assert len(cache.known) < 60 and len(cache.entries) < 60
    num_runs = cache.num_runs
    model(torch.randn(1, 3)).square().mean().item()
    assert cache.num_runs == num_runs

"""Computed values of unusual layouts, sizes and histories: read, written and used as in one process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, mlp, on_ranks
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.graph import Meta, Value
from farspan.record.deferred.compute import Computing
from farspan.record.deferred.deferred_call import is_view


def _wide() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 100_000))


def _typed(out: torch.Tensor, model: nn.Module) -> Any:
    """Views that count other elements than the tensor: other dtypes, complex numbers and their parts."""
    pairs = torch.view_as_complex(out.view(4, -1, 2))
    views = [out.view(torch.int32)[1, :4], out.view(torch.float64)[1, 7:9], pairs[1, 7:9], pairs.conj()[1, 7:9]]
    return [view.tolist() for view in [*views, pairs.imag[1, 7:9], pairs.conj().imag[1, 7:9]]]


def _written(out: torch.Tensor, model: nn.Module) -> Any:
    """A view of what has been written into, read before that has run."""
    row = out[1]
    part = row[5:10]
    part.mul_(2)
    return part.tolist(), row[:3].tolist()


def _looked_at(out: torch.Tensor, model: nn.Module) -> Any:
    """What the owner computes of a chain of views and the others do not is used by a recorded call later."""
    row = out[1]
    part = row[5:10]
    seen = part.tolist()
    model(torch.ones(4, 3)).mean().item()
    row.add_(1)
    return seen, part.tolist(), row[:3].tolist(), out[1, :3].tolist()


@pytest.mark.parametrize("program", [_typed, _written, _looked_at])
def test_views_of_a_large_tensor(program: Callable[..., Any]) -> None:
    def on(model: nn.Module) -> Any:
        out = model(torch.ones(4, 3)).detach()
        out.mean().item()
        return program(out, model)

    models = [_wide(), _wide()]
    got = run_threads(2, lambda rank: on(farspan.distribute(models[rank], plan={"0": 0, "1": 1})))
    assert got == [on(_wide())] * 2


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    out = model(X)
    F.cross_entropy(out, Y).backward()
    optimizer.step()
    return out


def _expanded(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Rows that share their memory."""
    out = model(X)
    rows = out[:1].expand(4, 5)
    out.sum().item()
    return (rows * 2).tolist(), rows[2].tolist(), (rows + 1).sum().item()


def _written_often(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Views of what still requires grad are written into, steps apart."""
    out = _train(model, optimizer).detach()
    row, flat, column = out[0], out.view(-1), out.t()[1]
    row[1:3].mul_(3)
    _train(model, optimizer)
    column.copy_(torch.arange(6.0))
    seen = [row.tolist(), flat.tolist()]
    _train(model, optimizer)
    return seen, [row.tolist(), flat.tolist(), out.tolist()]


def _drawn_into(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """The program draws random numbers into views of what has been computed."""
    torch.manual_seed(7)
    out = _train(model, optimizer).detach().softmax(-1)
    out[0].bernoulli_(0.5)
    out[1:3].normal_()
    return out.tolist(), torch.rand(2).tolist()


def _long_history(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Each op takes the last result twice, with gradient, and there are many."""
    out = model(X)
    out.sum().item()
    total = out
    for _ in range(40):
        total = (total + total) / 2
    best = (total > 0).nonzero().tolist(), total[total > 0].shape
    total.mean().backward()
    optimizer.step()
    return best, [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("program", [_expanded, _written_often, _drawn_into, _long_history])
def test_what_has_been_computed_is_used_as_in_one_process(program: Callable[..., Any]) -> None:
    def on(model: nn.Module) -> Any:
        return program(model, torch.optim.SGD(model.parameters(), lr=0.1))

    wanted = on(mlp())
    for got in on_ranks(2, lambda model: on(farspan.distribute(model))):
        assert got == wanted


@pytest.mark.parametrize(("shape", "stride"), [((3, 4), (0, 1)), ((3, 4), (4, 1)), ((1, 4), (0, 1)), ((2, 3), (1, 0))])
def test_what_is_fetched_is_laid_out_as_for_the_program(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    data = torch.arange(1.0, 13.0).as_strided(shape, stride)
    value = Value(Meta(shape, stride, torch.float32, torch.device("cpu"), False), 0)
    kept = Computing(None)._keep(value, data.clone())  # type: ignore[arg-type]
    assert kept.stride() == stride and kept.tolist() == data.tolist()


def test_only_what_takes_views_and_nothing_else_is_a_view() -> None:
    value = Value(
        Meta((2,), (1,), torch.float32, torch.device("cpu"), False), 0, None, 1
    )  # an input that a rank has read
    for shares, is_one in {(0,): True, (0, 0): True, (-1,): False, (0, -1): False, (): False}.items():
        entry: Any = SimpleNamespace(num_results=len(shares), shares=shares)
        assert is_view(entry, [value]) is is_one
        assert is_view(entry, [value, value]) is False

"""A buffer that a module writes, read while calls of the module wait to be run: what it is by then in one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.execute.process.world import current_engine

_READ: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda buffer: buffer.tolist(),
    "numpy": lambda buffer: buffer.numpy().tolist(),
    "str": str,
    "format": lambda buffer: f"{buffer.sum()}",
    "item": lambda buffer: buffer.sum().item(),
    "equal": lambda buffer: torch.equal(buffer, torch.zeros_like(buffer)),
    "deepcopy": lambda buffer: copy.deepcopy(buffer).tolist(),
    "save": lambda buffer: _saved(buffer).tolist(),
}


def _saved(buffer: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(buffer, file)
    file.seek(0)
    return torch.load(file)


def _model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def _program(model: Any, read: Callable[[Tensor], Any]) -> Any:
    x = torch.ones(3, 4) * torch.arange(3)[:, None]
    seen: list[Any] = []
    for _ in range(3):
        model(x).sum().backward()
        seen.append(read(model[1].running_mean))
        model(x).sum().backward()
        seen.append(model[1].num_batches_tracked.item())
    return seen


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("how", _READ)
def test_a_buffer_is_read_after_the_calls_that_write_it(how: str, num_ranks: int) -> None:
    wanted = _program(_model(), _READ[how])
    models = [_model() for _ in range(num_ranks)]
    for got in run_threads(num_ranks, lambda rank: _program(farspan.distribute(models[rank]), _READ[how])):
        assert got == wanted


def _kept_views(model: Any) -> Any:
    """A view of a buffer that the program keeps, read and used in operations after calls that write the buffer."""
    x = torch.ones(3, 4) * torch.arange(3)[:, None]
    part = model[1].running_mean[1:3]
    deeper = model[1].running_var.view(2, 2)[1]
    seen: list[Any] = []
    for _ in range(3):
        model(x).sum().backward()
        seen += [part.tolist(), (deeper * 2).sum().item()]
        model(x).sum().backward()
        seen += [(torch.ones(()) + part).tolist(), str(deeper)]
    model(x).sum().backward()
    part.zero_()
    return seen, model[1].running_mean.tolist()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_view_of_a_buffer_is_what_modules_have_written(num_ranks: int) -> None:
    wanted = _kept_views(_model())
    models = [_model() for _ in range(num_ranks)]
    for got in run_threads(num_ranks, lambda rank: _kept_views(farspan.distribute(models[rank]))):
        assert got == wanted


def test_one_rank_alone_reads_a_view_of_a_buffer() -> None:
    """After a step nothing waits to be run, so the others need not do the same."""

    def program(rank: int) -> Any:
        model: Any = farspan.distribute(models[rank])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        part = model[1].running_mean[1:3]
        seen = []
        for _ in range(3):
            model(torch.ones(3, 4) * torch.arange(3)[:, None]).sum().backward()
            optimizer.step()
            if rank == 1:
                seen.append((part.tolist(), model[1].running_mean.tolist()))
        return seen

    models = [_model() for _ in range(2)]
    seen = run_threads(2, program)[1]
    assert len(seen) == 3
    assert all(part == whole[1:3] and any(part) for part, whole in seen)


def test_a_parameter_of_a_model_that_is_gone_is_nobodys() -> None:
    from farspan.record.parameters import gradient_property

    def program(rank: int) -> Any:
        farspan.distribute(_model())
        plain = nn.Parameter(torch.ones(2))
        engine: Any = current_engine()
        gradient_property._recorders[id(plain)] = engine.recorder  # one of the same id was watched
        try:
            plain.grad = torch.ones(2)
            return plain.grad.tolist()
        finally:
            del gradient_property._recorders[id(plain)]

    assert run_threads(1, program) == [[1.0, 1.0]]

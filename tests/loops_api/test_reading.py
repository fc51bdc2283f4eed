"""Whatever reads a recorded value gets the value, on every rank, or an error by name."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, mlp, on_ranks, same_everywhere
from torch import Tensor, nn

import farspan
from farspan.errors import DivergenceError, RecordError
from farspan.execute.process.world import current_engine


def _reload(value: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


_READERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "str and repr": lambda loss, out: (str(loss), repr(out)),
    "formats": lambda loss, out: f"{loss:.4f} {loss.item()} {'%.3f' % loss} {'{:.2e}'.format(loss)}",  # noqa: UP031, UP032
    "numbers": lambda loss, out: (float(loss), int(loss * 100), round(float(loss), 3), complex(loss), bool(loss > 0)),
    "math": lambda loss, out: (math.exp(loss), math.isnan(loss)),
    "numpy": lambda loss, out: (out.numpy().tolist(), np.asarray(out).tolist(), float(np.mean([loss, loss]))),
    "pickle": lambda loss, out: pickle.loads(pickle.dumps(out)).tolist(),
    "save": lambda loss, out: _reload(out).tolist(),
    "copies": lambda loss, out: (copy.deepcopy(out).tolist(), copy.copy(out).tolist()),
    "order": lambda loss, out: (max([loss, loss * 2]).item(), [x.item() for x in sorted([loss, loss * 0.5])]),
    "sum": lambda loss, out: sum([loss, loss, loss * 0.1]).item(),  # type: ignore[union-attr]
    "index": lambda loss, out: ([10, 11, 12, 13, 14][out[0].argmax()], X[out.argmax(1)].tolist()),
    "iteration": lambda loss, out: [row.tolist() for row in out],
    "tensors": lambda loss, out: (torch.as_tensor(out).tolist(), torch.from_numpy(out.numpy()).tolist()),
    "dlpack": lambda loss, out: torch.from_dlpack(out).tolist(),
}


@pytest.mark.parametrize("kind", _READERS)
def test_a_reader_gets_the_value(kind: str) -> None:
    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        distribute(model)
        out = model(X)
        loss = F.cross_entropy(out, Y)
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return _READERS[kind](loss.detach(), out.detach())

    same_everywhere(program, 2)


@pytest.mark.parametrize("ask", [Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, torch.vmap(torch.sin)])
def test_what_needs_the_memory_is_refused(ask: Callable[[Tensor], Any]) -> None:
    def program(model: nn.Module) -> None:
        farspan.distribute(model)
        with pytest.raises(RecordError), torch.no_grad():
            ask(model(X))

    on_ranks(2, program)


def test_a_read_on_one_rank_inside_the_window_is_named_at_once() -> None:
    def program(model: nn.Module) -> None:
        farspan.distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = current_engine()
        assert engine is not None
        for _ in range(2):
            loss = F.cross_entropy(model(X), Y)
            if engine.rank == 0:
                loss.item()
            loss.backward()
        optimizer.step()

    with pytest.raises(DivergenceError, match="programs differ"):
        on_ranks(2, program)


def _norm(gradient: Any) -> float:
    return gradient.detach().data.norm(2).item()


def _mean_of_squares(gradient: Any) -> float:
    return float((gradient * gradient + 1e-3 * gradient.abs()).mean())


def _num_flushes() -> int:
    engine = current_engine()
    return 0 if engine is None else engine.num_flushes


@pytest.mark.parametrize("how", [_norm, _mean_of_squares])
def test_what_is_read_of_each_gradient_is_computed_together(how: Any) -> None:
    """`p.grad.norm().item()` in a loop: a few small steps for all parameters, not one for each."""

    def program(model: nn.Module, distribute: Any) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Any] = []
        flushes: list[int] = []
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            next(model.parameters()).grad.sum().item()  # type: ignore[union-attr]
            before = _num_flushes()
            seen.append([how(parameter.grad) for parameter in model.parameters()])
            flushes.append(_num_flushes() - before)
            list(model.parameters())[3].grad.mul_(2)  # type: ignore[union-attr]
            seen.append([how(parameter.grad) for parameter in model.parameters()])
            optimizer.step()
        return seen, flushes

    wanted, _ = program(mlp(), lambda model: model)
    for got, flushes in on_ranks(2, lambda model: program(model, farspan.distribute)):
        assert got == wanted
        assert flushes[0] <= 5 and flushes[2] <= 2 and len(wanted[0]) == 14

"""What must not depend on who is faster, with delays where it could."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.agreement.races import LateTransport, reading_late
from tests.support.loop import X, Y, mlp
from tests.support.ranks import run_threads
from torch import nn

import farspan

PLAN = {"layers.0": "rank:0", "": "rank:1"}


def ends(model: Any) -> tuple[nn.Parameter, nn.Parameter]:
    parameters = [item for item in model.parameters() if item.dim() == 1]
    return parameters[0], parameters[1]


class Scaling(torch.optim.Optimizer):
    """Writes into the gradients in its step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in [item for group in self.param_groups for item in group["params"]]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad.mul_(-7.0))


def mixed(model: Any, place: Any = contextlib.nullcontext) -> list[float]:
    """A gradient of one rank goes to another, and is written into by the step that comes right after."""
    first, second = ends(model)
    optimizer = Scaling(model.parameters())
    F.cross_entropy(model(X), Y).backward()
    assert first.grad is not None and second.grad is not None
    with torch.no_grad():
        first.grad.mul_(0.5)
        with place():
            found = first.grad + second.grad.sum()
    optimizer.step()
    return found.tolist()


def test_a_gradient_that_is_on_its_way_may_be_written_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farspan.comm.channels._ALONE_BYTES", 0)  # small tensors are copied into one message
    wanted = mixed(mlp())
    models = [mlp() for _ in range(2)]

    def program(rank: int) -> list[float]:
        return mixed(farspan.distribute(models[rank], plan=PLAN), lambda: farspan.on("rank:1"))

    assert run_threads(2, program, transport=LateTransport) == [wanted] * 2


def test_a_step_that_changes_state_waits_for_those_who_still_read_it() -> None:
    def program(model: Any, rank: int = 0) -> list[Any]:
        first, _ = ends(model)
        F.cross_entropy(model(X), Y).backward()
        assert first.grad is not None
        seen = None
        if rank == 1:
            with reading_late():
                seen = first.grad.tolist()
        with torch.no_grad():
            first.grad.mul_(-7.0)
        farspan.flush()
        return [first.grad.tolist(), seen]

    plain = mlp()
    after, _ = program(plain)
    before = [value / -7.0 for value in after]
    models = [mlp() for _ in range(2)]
    finished = run_threads(2, lambda rank: program(farspan.distribute(models[rank], plan=PLAN), rank))
    assert [found for found, _ in finished] == [after] * 2
    assert torch.allclose(torch.tensor(finished[1][1]), torch.tensor(before))


@pytest.mark.parametrize("uses_hidden", [False, True])
def test_what_a_step_releases_is_kept_for_those_who_still_read_it(uses_hidden: bool) -> None:
    """A backward goes through values that the owner then drops, while another rank is still reading them."""

    def program(model: Any, rank: int = 0, late: Any = contextlib.nullcontext) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(X)
        hidden = out.exp()
        out.sum().item()
        seen = None
        if rank == 0:
            with late():
                seen = (hidden if uses_hidden else out).tolist()
        (hidden if uses_hidden else out.square()).mean().backward()
        del out, hidden
        optimizer.step()
        return [model(X).sum().item(), seen]

    after, seen = program(mlp())
    models = [mlp() for _ in range(2)]
    found = run_threads(2, lambda rank: program(farspan.distribute(models[rank], plan=PLAN), rank, reading_late))
    assert found == [[after, seen], [after, None]]

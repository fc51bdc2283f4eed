"""Programs that are kept for steps that look alike: each is the one that would be built afresh, or it is not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.program.described import CheckedPrograms
from tests.support.cases import CASES
from tests.support.loop import X, Y, mlp, on_ranks, steps, weights
from tests.support.parity import build, last_plan, train_distributed, train_plainly
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
import farspan.execute.engine as engine_module
from farspan.execute.process.world import current_engine


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs are made from patterns, and compared."""
    monkeypatch.setattr(engine_module, "Programs", CheckedPrograms)


def programs() -> CheckedPrograms:
    engine = current_engine()
    assert engine is not None and isinstance(engine.programs, CheckedPrograms)
    return engine.programs


@pytest.mark.parametrize("name", CASES)
def test_a_kept_program_is_the_one_built_afresh(name: str) -> None:
    case = CASES[name]
    requested = train_plainly(case)
    models = [build(case) for _ in range(3)]

    def program(rank: int) -> tuple[list[str], int]:
        for plan in last_plan(case, 3).values():
            differences = train_distributed(models[rank], case, plan, schedule="zero-bubble").differences(requested)
            return differences, programs().num_compared
        raise AssertionError("no plan")

    for differences, num_compared in run_threads(3, program):
        assert not differences
        assert num_compared >= 3, "one for each step"


def asked_for(model: nn.Module) -> Any:
    parameters = list(model.parameters())
    found = []
    for _ in range(3):
        loss = F.cross_entropy(model(X), Y)
        gradients = torch.autograd.grad(loss, [parameters[0], parameters[-1]], retain_graph=True)
        loss.backward()
        found += [gradient.tolist() for gradient in gradients]
    return found


def twice(model: nn.Module) -> Any:
    for number in range(3):
        loss = model(X).square().mean()
        loss.backward(retain_graph=True)
        if number == 1:
            farspan.flush()
        loss.backward()
        farspan.flush()
    return [parameter.grad.tolist() for parameter in model.parameters()]  # type: ignore[union-attr]


def trained_outside(model: nn.Module) -> Any:
    weight, given = torch.ones((), requires_grad=True), X.clone().requires_grad_()
    for number in range(4):
        (model(given).square().mean() * weight).backward()
        if number % 2:
            farspan.flush()
    assert weight.grad is not None and given.grad is not None
    return weight.grad.item(), given.grad.tolist()


def frozen_later(model: nn.Module) -> Any:
    first: Any = next(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = [steps(model, optimizer, 2)]
    first.requires_grad_(False)
    found.append(steps(model, optimizer, 2))
    model.eval()
    first.requires_grad_(True)
    return [*found, steps(model, optimizer, 2), weights(model)]


def doubled(*given: Any) -> Any:
    return given[-1] * 2


def hooked_later(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = [steps(model, optimizer, 2)]
    parameters = list(model.parameters())
    handle = parameters[2].register_hook(doubled)
    forward = model.get_submodule("layers.3").register_forward_hook(doubled)
    found.append(steps(model, optimizer, 2))
    handle.remove()
    forward.remove()
    return [*found, steps(model, optimizer, 2), weights(model)]


def carried(model: nn.Module) -> Any:
    """A state goes on from micro-batch to micro-batch, and, without its gradient, from step to step."""
    state: Tensor = X
    for number in range(6):
        state = torch.tanh(X + model.get_submodule("layers.4")(model.get_submodule("layers.0")(state)))
        state.square().mean().backward(retain_graph=number % 2 == 0)
        if number % 2:
            farspan.flush()
            state = state.detach()
    return [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None]


def of_other_sizes(model: nn.Module) -> Any:
    for number in (1, 2, 2, 3, 1, 2):
        for _ in range(number):
            model(X[:number]).square().mean().backward()
        farspan.flush()
    return [parameter.grad.tolist() for parameter in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "loop", [asked_for, twice, trained_outside, frozen_later, hooked_later, carried, of_other_sizes]
)
def test_other_loops_too(loop: Callable[[nn.Module], Any]) -> None:
    requested = loop(mlp())
    for found, num_compared in on_ranks(3, lambda model: (loop(farspan.distribute(model)), programs().num_compared)):
        assert found == requested
        assert num_compared

"""Gradients that the program replaces, holds and reads, on ranks of which one is behind the other."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.execute.agreement.step_start import StepStart
from farspan.execute.values import SharedValues

PLANS: dict[str, dict[str, str]] = {
    "two stages": {"0": "rank:0", "1": "rank:1"},
    "a wide stage": {"": "rank:0+rank:1"},
}
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))


def _backward(model: nn.Module, number: int) -> None:
    model(X + number).square().mean().backward()


def _gradients(model: nn.Module) -> list[Any]:
    return [None if item.grad is None else item.grad.tolist() for item in model.parameters()]


def _same(plan: str, program: Callable[[nn.Module, int], Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    wanted = program(copy.deepcopy(model), -1)
    models = [copy.deepcopy(model) for _ in range(2)]
    found = run_threads(2, lambda rank: program(farspan.distribute(models[rank], plan=PLANS[plan]), rank))
    assert found == [wanted] * 2


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_that_are_held_and_put_in_the_place_of_others(plan: str) -> None:
    """Other ranks were given the first one that was there since the last step."""

    def program(model: nn.Module, rank: int) -> list[Any]:
        found: list[Any] = []
        held: list[list[Any]] = []
        for number in range(3):
            _backward(model, number)
            held.append([item.grad for item in model.parameters()])
            if number == 1:
                held[0][1].mul_(2)
            model.zero_grad()
            found.append([[gradient.tolist() for gradient in gradients] for gradients in held])
        first, second, _ = held
        for item, a, b in zip(model.parameters(), first, second, strict=True):
            item.grad = a + b
        found.append(_gradients(model))
        for item, gradient in zip(model.parameters(), first, strict=True):
            item.grad = gradient
        found.append(_gradients(model))
        _backward(model, 3)
        return [*found, _gradients(model), [gradient.tolist() for gradient in first]]

    _same(plan, program)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_has_not_got_to_the_gradient_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    has_asked = threading.Event()
    ask = SharedValues._ask
    is_watched = False

    def watched(self: Any, *args: Any) -> Any:
        if is_watched:
            has_asked.set()
        return ask(self, *args)

    monkeypatch.setattr(SharedValues, "_ask", watched)

    def program(model: nn.Module, rank: int) -> list[Any]:
        nonlocal is_watched
        _backward(model, 0)
        found = _gradients(model)
        if rank == slow:
            assert has_asked.wait(20.0)
        for item in model.parameters():
            item.grad = torch.full(item.shape, 2.0)
        if rank == 1 - slow:
            is_watched = True
        return [found, _gradients(model)]

    _same("two stages", program)


def test_nothing_is_added_to_a_gradient_that_a_slower_rank_still_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a wide stage the first rank goes on alone: the second one was given the sum of both micro-batches."""
    has_gone_on = threading.Event()
    wait = StepStart.wait
    has_read = False

    def watched(self: StepStart) -> None:
        if has_read and self._side.rank == 0:
            has_gone_on.set()
        wait(self)

    monkeypatch.setattr(StepStart, "wait", watched)

    def program(model: nn.Module, rank: int) -> list[Any]:
        nonlocal has_read
        _backward(model, 0)
        gradients = [item.grad for item in model.parameters()]
        if rank == 0:
            has_read = True
        if rank == 1:
            assert has_gone_on.wait(20.0)
        found = [gradient.tolist() for gradient in gradients]  # type: ignore[union-attr]
        _backward(model, 1)
        return [found, _gradients(model)]

    _same("a wide stage", program)

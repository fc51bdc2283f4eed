"""What has run ends with the last tensor that the program holds of it, and is not left to Python's cycle collector."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, on_ranks
from torch import nn

import farspan
from farspan.execute.process.world import current_engine
from farspan.record.unrecorded import unrecorded

SIZES = (6, 5, 6)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(X[:size]), Y[:size])
    loss.backward()
    optimizer.step()
    loss.item()


def _evaluate(model: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> None:
    """With gradients, as people do who forget `no_grad`: no backward ever comes."""
    F.cross_entropy(model(X[:size]), Y[:size]).item()


def _accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> None:
    for part, target in zip(X[:size].split(3), Y[:size].split(3), strict=True):
        F.cross_entropy(model(part), target).backward()
    optimizer.step()
    optimizer.zero_grad()


def _read_first(model: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> None:
    """The loss is read, and printed, before its backward; another goes through the same graph."""
    out = model(X[:size])
    loss = F.cross_entropy(out, Y[:size])
    assert loss.item() > 0
    loss.backward(retain_graph=True)
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _derive(model: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> None:
    x = X[:size].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    gradient.norm().item()


def _count() -> Counter[str]:
    """How many calls, values, segments, ... have been made since the collector was stopped, and are still there."""
    kinds = [type(item) for item in gc.get_objects(generation=0)]
    return Counter(kind.__name__ for kind in kinds if str(kind.__module__).startswith("farspan.graph"))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("step", [_train, _evaluate, _accumulate, _read_first, _derive])
def test_steps_leave_nothing_to_the_collector(step: Callable[..., None], num_ranks: int) -> None:
    together = threading.Barrier(num_ranks, timeout=60)

    def program(model: Any) -> list[Counter[str]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts: list[Counter[str]] = []
        for number in range(16):
            step(model, optimizer, SIZES[number % 3])
            if number in (12, 15):  # after the first steps, which are measured and planned again; of the same size
                together.wait()
                counts.append(_count())
                together.wait()
        return counts

    gc.disable()
    try:
        before, after = on_ranks(num_ranks, lambda model: program(farspan.distribute(model)))[0]
    finally:
        gc.enable()
    assert before["Graph"] and after == before  # the one that is being recorded is always there


def test_between_steps_nothing_of_the_last_one_is_there() -> None:
    """Neither where a program is built afresh, nor where it is laid out for later steps, nor where it is a kept one."""

    def program(model: Any) -> list[int]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        left: list[int] = []
        for _ in range(5):
            _accumulate(model, optimizer, 6)
            left.append(_count()["BackwardSegment"])
        return left

    gc.disable()
    try:
        left = on_ranks(1, lambda model: program(farspan.distribute(model)))[0]
    finally:
        gc.enable()
    assert left == [0] * 5


def test_what_farspan_runs_leaves_recording_as_it_was() -> None:
    def program(model: nn.Module) -> tuple[bool, bool]:
        farspan.distribute(model)
        engine = current_engine()
        assert engine is not None
        with unrecorded(engine.recorder):
            with engine.executing():
                pass
            inside = engine.recorder.is_recording
        with engine.executing():
            pass
        return inside, engine.recorder.is_recording

    assert on_ranks(1, program) == [(False, True)]

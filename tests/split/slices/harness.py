"""Runs loops with parameters in slices, and in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.ranks import run_threads
from tests.wide.loops import Net, loss_of

import farspan
from farspan.execute.process.world import current_engine

__all__ = ["Act", "assert_close", "first", "run"]

Act = Callable[[Any, Any, int], Any]
"""What a loop does in a step, between the backward and the optimizer's step."""
NUM_STEPS = 9


def first(model: Any) -> Any:
    return model.blocks[0].a.weight


def train(model: Any, act: Act) -> tuple[list[Any], list[int]]:
    """Returns what a loop sees, and for each step how many parameters lie in slices behind it."""
    model.eval()  # no dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    numbers: list[int] = []
    for step in range(NUM_STEPS):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        if step % 2:
            loss_of(model, step + 20).backward()
        seen.append(act(model, optimizer, step))
        optimizer.step()
        seen.append(float(loss.detach()))
        engine = current_engine()
        numbers.append(0 if engine is None else len(engine.slices.owned.slices))
    seen.append([item.tolist() for item in model.state_dict().values()])
    state = optimizer.state_dict()["state"]
    seen.append([{key: item.tolist() for key, item in state[number].items()} for number in sorted(state)])
    return seen, numbers


def run(act: Act, num_ranks: int = 2, **options: Any) -> tuple[Any, list[tuple[Any, list[int]]]]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Net()
        wanted, _ = train(copy.deepcopy(model), act)
        models = [copy.deepcopy(model) for _ in range(num_ranks)]
        options = {"tensor_parallel": 2} | options
        return wanted, run_threads(num_ranks, lambda rank: train(farspan.distribute(models[rank], **options), act))


def assert_close(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        found, wanted = list(found.values()), list(wanted.values())
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    elif wanted is None or isinstance(wanted, str):
        assert found == wanted
    else:
        assert found == pytest.approx(wanted, rel=2e-4, abs=2e-5)

"""What takes long says what it is and how far, on rank 0's console; what is quick says nothing."""

from __future__ import annotations

import copy
import dataclasses
import queue
import threading
import time
from typing import Any

import pytest
import torch
from tests.support.places import engine
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan import progress
from farspan.control.waits import Waits
from farspan.execute.process.console import Console
from farspan.place.repartition import migrate
from farspan.place.repartition.search import Choice, PlanSearch
from farspan.plan import Plan
from farspan.progress import SpreadWork, said_if_slow

NEVER_S = 60.0
PLACEMENT = {"0": 0, "1": 0, "2": 0, "3": 1}


def test_long_work_says_how_far_it_is_and_quick_work_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(progress, "PATIENCE_S", 0.01)
    with said_if_slow("searching for a plan", lines.put) as far:
        assert lines.get(timeout=NEVER_S) == "farspan: searching for a plan for 0 s"
        far.note(3, 4, "parameters")
        while lines.get(timeout=NEVER_S) != "farspan: searching for a plan: 3 of 4 parameters":
            pass
    monkeypatch.setattr(progress, "PATIENCE_S", NEVER_S)
    before = threading.active_count()
    with said_if_slow("searching for a plan", lines.put):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_work_inside_other_work_is_not_said_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(progress, "PATIENCE_S", 0.01)
    with said_if_slow("outer", lines.put), said_if_slow("inner", lines.put):
        assert lines.get(timeout=NEVER_S).startswith("farspan: outer")
        assert lines.get(timeout=NEVER_S).startswith("farspan: outer")


def test_short_parts_are_said_once_all_together_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    now_s = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    work = SpreadWork("trying the model on fake tensors", "call")
    work.say = lines.put
    for _ in range(2):
        with work.part():
            now_s[0] += 2.9 / 2
    assert lines.empty()
    with work.part():
        now_s[0] += 0.2
    assert lines.get_nowait() == "farspan: trying the model on fake tensors, 3 calls so far, for 3 s"
    work.end()
    with work.part():
        now_s[0] += 2.9
    assert lines.empty()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The lines of all ranks, for whom a hundredth of a second is long."""
    lines: list[tuple[int, str]] = []
    monkeypatch.setattr(progress, "PATIENCE_S", 0.01)
    monkeypatch.setattr(Console, "warn", lambda self, text: lines.append((self.side.rank, text)))
    return lines


class Slow(nn.Module):
    """A layer that takes longer than one has patience."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x + self.layer(x)


def _train_on_two_ranks(num_micro_batches: int, **options: Any) -> None:
    model = nn.Sequential(*(Slow() for _ in range(4)))
    models = [copy.deepcopy(model) for _ in range(2)]
    run_threads(2, lambda rank: _train(models[rank], num_micro_batches, **options))


def _train(model: nn.Module, num_micro_batches: int, **options: Any) -> None:
    farspan.distribute(model, measure=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        for _ in range(num_micro_batches):
            model(torch.ones(8, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine().agreement.barrier("the end")


def test_the_measured_first_step_says_how_far_it_is(said: list[tuple[int, str]]) -> None:
    _train_on_two_ranks(5)
    measuring = [text for _, text in said if text.startswith("farspan: measuring the first step")]
    assert measuring[-1].endswith(" of 5 micro-batches")
    assert any("trying the model on fake tensors, " in text for _, text in said)
    assert {rank for rank, text in said if "measuring" in text} == {0}


def test_trying_micro_batches_says_what_it_is(said: list[tuple[int, str]]) -> None:
    _train_on_two_ranks(1, micro_batches=4)
    assert any("trying whether batches can be cut into micro-batches" in text for _, text in said)
    assert any(text.endswith(" of 4 micro-batches") for _, text in said)


def test_a_quick_first_step_says_nothing(said: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", NEVER_S)
    _train_on_two_ranks(5)
    assert said == []


def test_the_search_for_a_plan_and_moving_parameters_are_said(
    said: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, fetched = PlanSearch.choose, migrate._fetched

    def choose_late(search: PlanSearch, current: Plan) -> Choice:
        time.sleep(0.05)
        return dataclasses.replace(choose(search, current), plan=dataclasses.replace(current, placement=PLACEMENT))

    def fetched_late(*args: Any) -> Any:
        time.sleep(0.05)
        return fetched(*args)

    monkeypatch.setattr(PlanSearch, "choose", choose_late)
    monkeypatch.setattr(migrate, "_fetched", fetched_late)
    _train_on_two_ranks(5)
    assert any(text.startswith("farspan: searching for a plan for ") for _, text in said)
    assert any(text.startswith("farspan: moving parameters: ") for _, text in said)


def test_work_that_waits_for_another_rank_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "0 of 1 micro-batches" was said for as long as another rank hung."""
    waits = Waits()
    work = progress.Progress("measuring the first step", waits.describe_other)
    work.note(0, 1, "micro-batches")
    with waits.until(lambda: "to begin step 3", {"rank": 1}):
        assert work.described(3.0) == "farspan: measuring the first step: 0 of 1 micro-batches"  # waits are short
        monkeypatch.setattr("farspan.control.waits._BRIEF_S", 0.0)
        assert work.described(3.0).endswith(": 0 of 1 micro-batches, waiting for rank 1 to begin step 3")
    assert work.described(3.0).endswith(": 0 of 1 micro-batches")

"""Several devices of one process: each has an order of its own, and none waits because another one does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.plainly import assert_same_as_plainly, train
from tests.support.ranks import run_processes
from torch import Tensor, nn

from farspan.execute.process.world import current_engine
from farspan.execute.step.turns import in_turn
from farspan.schedule import SCHEDULES


def action(name: str, queue: int, *, after: Sequence[Any] = (), receives: Sequence[str] = ()) -> Any:
    return SimpleNamespace(name=name, queue=queue, after=list(after), receives=list(receives))


def order_of(actions: list[Any], *, arrives: Sequence[str]) -> list[str]:
    """What happens, where each time that nothing is ready the next message of `arrives` comes."""
    happened: list[str] = []
    here: set[str] = set()
    coming = iter(arrives)

    def wait_any(waiting: Sequence[Any]) -> None:
        here.add(next(coming))
        happened.append("waits for " + ", ".join(item.name for item in waiting))

    def begin(item: Any) -> None:
        begun.append(item.name)

    begun: list[str] = []
    item: Any
    for _, item in in_turn(actions, begin=begin, has_arrived=here.__contains__, wait_any=wait_any):
        assert item.name in begun, "its receives have been posted"
        happened.append(item.name)
    assert sorted(begun) == sorted(item.name for item in actions), "each once"
    return happened


def test_a_worker_that_waits_keeps_no_other_from_going_on() -> None:
    first = [action("F0", 0), action("B0", 0, receives=["gradient"]), action("F1", 0)]
    second = [action("G0", 1, after=first[:1]), action("G1", 1), action("H0", 1, receives=["other"])]
    found = order_of([*first, *second], arrives=["gradient", "other"])
    assert found == ["F0", "G0", "G1", "waits for B0, H0", "B0", "F1", "waits for H0", "H0"]
    found = order_of([*first, *second], arrives=["other", "gradient"])
    assert found == ["F0", "G0", "G1", "waits for B0, H0", "H0", "waits for B0", "B0", "F1"]


def test_a_worker_that_needs_another_one_of_its_process_lets_that_go_first() -> None:
    first = [action("F0", 0), action("F1", 0, receives=["x"])]
    second = [action("G1", 1, after=first[1:]), action("G2", 1)]
    assert order_of([*second, *first], arrives=["x"]) == ["F0", "waits for F1", "F1", "G1", "G2"]


@pytest.mark.parametrize("plan", ["rank:0/cpu:1 rank:1/cpu:1", "rank:0/cpu rank:1/cpu"])
def test_one_worker_a_rank_takes_no_turns(monkeypatch: pytest.MonkeyPatch, plan: str) -> None:
    """Each of its actions runs as it comes: choosing would cost time, and there is nothing to choose."""
    monkeypatch.setattr("farspan.execute.step.executor.in_turn", None)
    first, second = plan.split()
    places = dict.fromkeys(NAMES[:3], first) | dict.fromkeys(NAMES[3:], second)
    assert_same_as_plainly(Layers, train, 2, plan=places)


class Layers(nn.Module):
    """What the first layer gives goes to the last one too; one weight is used twice; running statistics, dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.norm, self.dropout, self.head = nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 5)
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            x = self.dropout(torch.relu(layer(x)))
        return self.head(self.norm(x) + first)


PLACES = (
    "rank:0/cpu:0",
    "rank:1/cpu:0",
    "rank:0/cpu:1",
    "rank:1/cpu:1",
    "rank:0/cpu:0",
    "rank:0/cpu:1",
    "rank:1/cpu:1",
)
NAMES = ("layers.0", "layers.1", "layers.2", "layers.3", "norm", "dropout", "head")


def plan_of(num_ranks: int) -> dict[str, str]:
    return {
        name: place if num_ranks == 2 else place.replace("rank:1", "rank:0").replace("cpu:1", "cpu:2")
        for name, place in zip(NAMES, PLACES, strict=True)
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_numbers_are_those_of_the_plain_program(num_ranks: int, schedule: str) -> None:
    def program(model: Any) -> Any:
        found = train(model)
        engine = current_engine()
        if engine is not None and engine.last_training_step is not None:
            step = engine.last_training_step
            assert {trace.queue for trace in step.traces} == (
                {0, 1} if num_ranks == 1 else {engine.rank, 2 + engine.rank}
            )
        return found

    assert_same_as_plainly(Layers, program, num_ranks, plan=plan_of(num_ranks), schedule=schedule)


SCRIPT = """
import copy, json, torch, farspan
from tests.execute.test_several_devices import Layers, plan_of
from tests.support.plainly import train
torch.manual_seed(0)
model = Layers(dropout=0.5)
state = torch.get_rng_state()
wanted = train(copy.deepcopy(model))
torch.set_rng_state(state)
print(json.dumps(train(farspan.distribute(model, plan=plan_of(2))) == wanted))
"""


@pytest.mark.parametrize("same_host", ["0", "1"])
def test_over_real_transports_too(tmp_path: Any, same_host: str) -> None:
    """Over gloo, which has to be asked by a thread whether something has come, and from memory to memory."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    finished = run_processes(2, script, environment={"FARSPAN_SAME_HOST": same_host})
    assert [process.stderr for process in finished if process.code] == []
    assert [json.loads(process.stdout.splitlines()[-1]) for process in finished] == [True, True]

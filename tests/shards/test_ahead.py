"""Data of parameters that are away come before they are needed, in the order of the step before."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from farspan.call.leaf import Placed
from farspan.execute.shards.parameters import AwayParameters, _can_go
from farspan.graph import Meta

NAMES = [f"w{number}" for number in range(32)]
WRITES = "a test"
WAIT_S = 0.01


class Home:
    """The only other group: it says what it is asked for, and answers at once or when it is waited for."""

    def __init__(self) -> None:
        self.clock = 0
        self.asked: list[list[str]] = []
        self.open = 0
        self.most_open = 0
        self.broken = False
        self.before_answer: Callable[[], None] = lambda: None

    def answer_with(self, handlers: Any) -> None: ...

    def advance(self) -> None:
        assert self.open == 0, "somebody still waits for what it was before"
        self.clock += 1

    def begin(self, rank: int, kind: str, names: list[str]) -> Any:
        assert (rank, kind) == (1, "weights")
        self.asked.append(names)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        data = [torch.full((4,), float(name[1:]) + self.clock) for name in names]
        return SimpleNamespace(wait=lambda: self._answer(data))

    def _answer(self, data: list[torch.Tensor]) -> Any:
        self.open -= 1
        self.before_answer()
        if self.broken:
            raise ConnectionError("the home is gone")
        return {}, data


@pytest.fixture
def home() -> Home:
    return Home()


@pytest.fixture
def away(home: Home) -> AwayParameters:
    engine = SimpleNamespace(executor=SimpleNamespace(waited_ns=0))
    groups: Any = SimpleNamespace(agree=lambda what: None, engine=engine)
    homes: Any = SimpleNamespace(is_here=lambda item: False, group_of=lambda item: 1, rank_of=lambda item: 1)
    peers: Any = home
    made = AwayParameters(groups, homes, peers)
    meta = Meta((4,), (1,), torch.float32, torch.device("cpu"), True)
    made.release([Placed(name, 0, torch.nn.Parameter(torch.zeros(4)), meta, True, True, Parameter) for name in NAMES])
    return made


def test_what_an_operation_waits_for_its_parameters_is_no_computing(home: Home, away: AwayParameters) -> None:
    def sleep() -> None:
        time.sleep(WAIT_S)

    home.before_answer = sleep
    weight = next(iter(away._items.values())).tensor
    assert (weight + 1).tolist() == [1.0] * 4
    assert away._groups.engine.executor.waited_ns > 1e9 * WAIT_S


def step(away: AwayParameters, home: Home, names: list[str]) -> None:
    """Reads parameters one by one, each of which must be what its home holds now; then all groups have stepped."""
    for name in names:
        assert away.fetch([name])[name].tolist() == [float(name[1:]) + home.clock] * 4
        assert away._here_bytes <= away._most_bytes
    away.settle()
    away.changed()
    home.advance()


def test_what_comes_next_is_asked_for_before_it_is_needed(away: AwayParameters, home: Home) -> None:
    step(away, home, NAMES)
    assert home.asked == [[name] for name in NAMES] and home.most_open == 1  # nothing is known yet
    home.asked.clear()
    away.fetch(["w0"])
    assert home.asked == [["w0", "w1"], ["w2", "w3"]] and home.open == 1
    away.fetch(["w0"])
    away.fetch(["w1"])
    assert len(home.asked) == 2
    away.fetch(["w2"])
    assert home.asked[2:] == [["w4", "w5"]]
    away.fetch(["w3"])
    step(away, home, NAMES[4:])
    assert sorted([name for names in home.asked for name in names]) == sorted(NAMES)  # each once


def test_another_order_than_before_is_right_too(away: AwayParameters, home: Home) -> None:
    for names in (NAMES, NAMES[::-1], [*NAMES, *NAMES[::-1]], NAMES[::3], [*NAMES[5:9] * 3], NAMES):
        step(away, home, names)


def test_nothing_is_asked_for_in_advance_between_an_agreement_and_the_change(away: AwayParameters, home: Home) -> None:
    step(away, home, NAMES)
    away.settle()
    home.asked.clear()
    away.fetch(["w0"])
    assert len(home.asked) == 1 and home.open == 0
    away.begin_write(WRITES)
    away.end_write()
    away.fetch(["w0"])
    assert home.open == 1


def test_an_answer_that_did_not_come_is_an_error_where_it_is_needed(away: AwayParameters, home: Home) -> None:
    step(away, home, NAMES)
    away.fetch(["w0"])
    home.broken = True
    with pytest.raises(ConnectionError):
        away.fetch(["w2"])
    home.broken = False
    assert away.fetch(["w2"])["w2"].tolist() == [2.0 + home.clock] * 4


def test_what_the_program_has_written_on_a_parameter_is_still_on_it_when_it_is_away() -> None:
    nothing: Any = SimpleNamespace(is_here=lambda item: False, answer_with=lambda handlers: None)
    away, parameter = AwayParameters(nothing, nothing, nothing), Parameter(torch.zeros(4))
    parameter.decay = 0.5  # type: ignore[attr-defined]
    meta = Meta((4,), (1,), torch.float32, torch.device("cpu"), True)
    item = Placed("w", 0, parameter, meta, True, True, Parameter)
    away.release([item])
    assert away.is_away(item) and parameter.decay == 0.5  # type: ignore[attr-defined]
    assert parameter.requires_grad and isinstance(parameter, Parameter)


CHANNELS_LAST = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("data", "can_go"),
    [
        (torch.zeros(3, 2), True),
        (torch.zeros(3, 2).t(), False),
        (torch.zeros(2, 3, 4, 5), True),
        (CHANNELS_LAST, True),
        (CHANNELS_LAST.transpose(0, 1), False),
        (torch.zeros(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), False),
        (torch.zeros(3, dtype=torch.int64), False),
        (torch.zeros(3, dtype=torch.complex64), True),
    ],
)
def test_parameters_go_whose_layout_a_message_keeps(data: torch.Tensor, can_go: bool) -> None:
    item: Any = SimpleNamespace(tensor=Parameter(data, requires_grad=False))
    assert _can_go(item) is can_go

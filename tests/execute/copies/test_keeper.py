"""How one rank goes on after a loss, as far as it decides that itself: the world, its launcher and its channels are
stand-ins.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farspan.errors import RemoteError
from farspan.execute.copies import keeper as going_on
from farspan.execute.copies.keeper import Keeper


def loss_of(rank: int) -> RemoteError:
    error = RemoteError(f"rank {rank} died.")
    error.rank, error.is_loss = rank, True
    return error


class Launcher:
    """A membership of ranks 0 and 2, which are left of three."""

    def __init__(self) -> None:
        self.suspected: list[int] = []
        self.at_forming: Any = lambda: None

    def is_lost(self, rank: int) -> bool:
        return rank == 1

    def is_broken(self) -> bool:
        return False

    def suspect(self, rank: int) -> None:
        self.suspected.append(rank)

    def say_needed(self, why: str) -> None:
        pass

    def form(self, state: Any, deadline_s: float) -> Any:
        self.at_forming()
        return SimpleNamespace(ranks=[0, 2], states=["3", "3"])


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """That of rank 0, which has run three operations, and whose program has recorded graphs 7 and 8 since."""
    graphs = [SimpleNamespace(index=index) for index in (7, 8)]
    recorder = SimpleNamespace(pending=graphs[:1], current=graphs[1])
    engine = SimpleNamespace(num_ranks=3, rank=0, side=SimpleNamespace(), recorder=recorder, deadline_s=1.0)
    engine.interrupt = lambda: None
    monkeypatch.setattr(going_on, "KeptCopies", lambda engine: SimpleNamespace())
    made: Any = Keeper(engine, lambda why: None)  # type: ignore[arg-type, return-value]
    engine.side.take_failure = lambda error: made._hear(engine.side, error)
    made._num_committed = 3
    made._membership = Launcher()
    made._worlds = SimpleNamespace(form=lambda world: (SimpleNamespace(failure=None), None), hear=lambda lost: None)
    for name in ("_agree_to_go_on", "_heirs", "_needed_for", "_say"):
        monkeypatch.setattr(made, name, lambda *args: {})
    monkeypatch.setattr(going_on, "leave", lambda engine: None)
    monkeypatch.setattr(going_on, "renumber", lambda *args: None)
    return made


def test_a_rank_that_leaves_a_world_takes_nobody_who_does_so_too_for_lost(keeper: Any) -> None:
    launcher, side = keeper._membership, keeper._engine.side
    keeper._hear(side, loss_of(1))
    assert launcher.suspected == [1]
    launcher.at_forming = lambda: keeper._hear(side, loss_of(2))  # rank 2 has closed its end of the channel
    keeper._recover()
    assert launcher.suspected == [1]
    side.failure = None
    keeper._hear(side, loss_of(1))  # of the two that are left
    assert launcher.suspected == [1, 2]


@pytest.mark.parametrize("states", [["3", "3"], ["3", "4"]])
def test_what_runs_again_after_a_loss_is_not_taken_for_what_ran_before_it(keeper: Any, states: list[str]) -> None:
    graphs, settled = [SimpleNamespace(index=index) for index in (5, 6)], []
    keeper._membership.form = lambda *args: SimpleNamespace(ranks=[0, 2], states=states)
    assert keeper._recover(lambda **given: settled.append(given), graphs) == max(map(int, states))
    is_committed = "4" in states  # then these have run, in the world before
    assert settled == [{"is_committed": is_committed}]
    assert keeper._first_graph == (7 if is_committed else 5)

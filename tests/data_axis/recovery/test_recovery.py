"""What all groups do together ends on all ranks that are left or on none, whenever one is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from farspan.comm.transport import TransferError
from farspan.errors import DivergenceError, RemoteError
from farspan.execute.data_axis.recovery.recovery import Recovery
from farspan.launch.membership import World


def loss(rank: int = 1) -> RemoteError:
    error = RemoteError(f"rank {rank} died")
    error.rank, error.is_loss = rank, True
    return error


class Everybody:
    """A channel of all ranks that fails at given steps, once each."""

    def __init__(self, failures: dict[int, Exception]) -> None:
        self.failures = failures
        self.failure: Exception | None = None
        self.agreed: list[int] = []

    def start(self, step: int, digest: int) -> None:
        pass

    def wait_agreed(self, step: int, deadline_s: float) -> None:
        if step in self.failures:
            self.failure = self.failures.pop(step)
            raise self.failure
        self.agreed.append(step)

    def finish(self, deadline_s: float) -> None:
        self.wait_agreed(-1, deadline_s)


class Around:
    """The channel of the group, the launcher, and what forms worlds: of rank 0 among three groups of one rank."""

    world_size, rank, number = 1, 0, 0

    def __init__(self, failures: dict[int, Exception], others: Sequence[int], *, is_broken: bool = True) -> None:
        self.everybody = Everybody(failures)
        self.ranks = [0, 1, 2]
        self.world = World(generation=0, ranks=self.ranks, states=())
        self.others = others
        """The numbers of operations that the others know to be committed."""
        self.broken = is_broken
        self.errors_of_forming: list[Exception] = []
        self.said: list[bool] = []
        self.suspected: list[int] = []
        self.end = self.hear = lambda *_: None

    def wait_broken(self, patience_s: float) -> bool:
        return self.broken

    def is_broken(self) -> bool:
        return self.broken

    def suspect(self, rank: int) -> None:
        self.suspected.append(rank)

    def form(self, *given: Any) -> Any:
        if len(given) == 2:  # by the launcher
            return World(generation=1, ranks=[0, 2], states=[given[0], *self.others])
        if self.errors_of_forming:
            raise self.errors_of_forming.pop()
        self.ranks = [0, 2]
        self.everybody.failure = None
        return None

    def say(self, *, is_complete: bool) -> None:
        self.said.append(is_complete)

    def abort(self) -> None:
        pass


def recovery_in(around: Any) -> Recovery:
    return Recovery(around, around, around, 1.0)


def run(around: Any, complete: Callable[[], None] = lambda: None) -> tuple[int, list[str]]:
    """Ends one operation; how many are committed then, and what was done."""
    recovery, done = recovery_in(around), list[str]()

    def complete_and_note() -> None:
        complete()
        done.append("complete")

    recovery.begin(7)
    recovery.commit(complete_and_note, lambda: done.append("again"))
    return recovery.num_committed, done


def test_what_another_one_knows_to_be_committed_is_used_as_it_is() -> None:
    around = Around({1: loss()}, others=[1])
    assert run(around) == (1, ["complete"])
    assert around.said == [True] and around.everybody.agreed == [0]


def test_what_nobody_knows_to_be_committed_is_done_again_also_where_it_was_complete() -> None:
    around = Around({1: loss()}, others=[0])
    assert run(around) == (1, ["complete", "again", "complete"])
    assert around.said == [False] and around.everybody.agreed == [0, 0, 1]


def test_a_broken_transfer_is_a_loss_if_the_launcher_says_so() -> None:
    failing = iter([TransferError("Connection closed by peer")])

    def complete() -> None:
        for error in failing:
            raise error

    assert run(Around({}, others=[0]), complete) == (1, ["again", "complete"])
    failing = iter([TransferError("Connection closed by peer")])
    with pytest.raises(TransferError):
        run(Around({}, others=[0], is_broken=False), complete)


def test_a_second_loss_while_the_others_form_a_world_is_one_more_round() -> None:
    around = Around({0: loss()}, others=[0])
    around.errors_of_forming = [RuntimeError("a store is gone"), RemoteError("a rank is lost")]
    assert run(around) == (1, ["again", "complete"])
    assert around.said == [False]


@pytest.mark.parametrize("error", [DivergenceError("the programs differ"), RemoteError("rank 1 failed: ValueError")])
def test_what_is_no_loss_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        run(Around({0: error}, others=[0], is_broken=False))


def test_the_end_of_all_programs_outlives_a_loss_too() -> None:
    around = Around({-1: loss()}, others=[0])
    recovery_in(around)
    around.finish_all(5.0)  # type: ignore[attr-defined]
    assert around.everybody.agreed == [-1]


def test_a_lost_connection_is_a_suspicion_only_where_the_launcher_knows_nothing() -> None:
    around = Around({}, others=[], is_broken=False)
    recovery_in(around)
    assert around.on_loss(loss(2)) and around.suspected == [2]  # type: ignore[attr-defined]
    around.broken = True
    assert around.on_loss(loss(1)) and around.suspected == [2]  # type: ignore[attr-defined]
    assert not around.on_loss(loss(0))  # type: ignore[attr-defined]  # of this group

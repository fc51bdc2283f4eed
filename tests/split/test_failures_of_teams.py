"""What goes wrong on one rank of a split stage ends all, with its name: none waits for a part that does not come."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.ranks import Finished, run_processes

PROGRAM = Path(__file__).parent / "fail_in_teams.py"


def fail(num_ranks: int, what: str, *, deadline_s: int = 60, stops: int | None = None) -> list[Finished]:
    return run_processes(num_ranks, PROGRAM, [what], environment={"FARSPAN_DEADLINE": str(deadline_s)}, stops=stops)


def assert_all_say(finished: list[Finished], *words: str) -> None:
    for rank, process in enumerate(finished):
        assert process.code == 1, f"rank {rank}: {process.stdout}{process.stderr}"
        assert not [word for word in words if word not in process.stderr], f"rank {rank}: {process.stderr}"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_an_exception_of_a_member_reaches_the_others(num_ranks: int) -> None:
    finished = fail(num_ranks, "raise")
    assert_all_say(finished, "ValueError: no more data")
    assert all(f"rank {num_ranks - 1} failed" in process.stderr for process in finished[:-1])


def test_an_exception_in_a_backward_reaches_the_members_that_wait_for_its_gradient() -> None:
    assert_all_say(fail(2, "raise in the backward"), "ValueError: no gradient here")


def test_a_member_that_is_killed_ends_the_others() -> None:
    assert_all_say(fail(2, "kill")[:1], "rank 1 died")


def test_a_member_that_stops_is_waited_for_no_longer_than_the_deadline() -> None:
    finished = fail(2, "stop", deadline_s=5, stops=1)
    assert finished[0].code == 1
    assert re.search(r"waited 5 s for (parameter .* from )?rank 1", finished[0].stderr), finished[0].stderr


@pytest.mark.parametrize("what", ["another shape", "another operation"])
def test_a_member_that_records_something_else(what: str) -> None:
    assert_all_say(fail(2, what), "the ranks' programs differ at step 2")

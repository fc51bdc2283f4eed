"""Whatever goes wrong, every rank says so by name, in three parts, and none hangs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tests.support.ranks import Finished, run_processes

PROGRAM = Path(__file__).parents[1] / "programs" / "wrong_use.py"
SCHEDULES = ("auto", "1f1b", "gpipe", "zero-bubble")
TRANSPORTS = {"memory to memory": "1", "gloo": "0"}
WAYS = list(itertools.product(SCHEDULES, TRANSPORTS))
FAILING = list(itertools.product(SCHEDULES, TRANSPORTS, ("forward", "backward")))


def run(how: str, num_ranks: int = 2) -> list[Finished]:
    return run_processes(num_ranks, PROGRAM, [how], environment={"FARSPAN_DEADLINE": "40"})


def run_under(
    schedule: str, transport: str, how: str, *, deadline_s: int = 40, stops: int | None = None
) -> list[Finished]:
    """Three ranks, of which the last goes wrong."""
    variables = {"FARSPAN_DEADLINE": str(deadline_s), "FARSPAN_SAME_HOST": TRANSPORTS[transport]}
    return run_processes(3, PROGRAM, [how, schedule], environment=variables, stops=stops)


def assert_all_say(finished: list[Finished], *words: str) -> None:
    for rank, process in enumerate(finished):
        assert process.code != 0, f"rank {rank} ended well"
        for word in words:
            assert word in process.stderr, f"rank {rank} does not say {word!r}:\n{process.stderr}"


@pytest.mark.parametrize(
    ("how", "num_ranks", "words"),
    [
        ("unknown_name", 2, ["PlanError", "secnod", "second", "  try  "]),
        ("nobody_owns", 2, ["PlanError", "third.weight", "  why  ", "  try  "]),
        ("no_such_rank", 2, ["PlanError", "rank:7", "  try  "]),
        ("too_many_ranks", 3, ["PlanError", "3 processes", "2 ranks", "  try  "]),
        ("other_plans", 2, ["DivergenceError", "different plans", "third", "  try  "]),
        ("cannot_be_recorded", 2, ["RecordError", "  why  ", "  try  "]),
    ],
)
def test_a_wrong_program_gets_a_three_part_error_on_every_rank(how: str, num_ranks: int, words: list[str]) -> None:
    assert_all_say(run(how, num_ranks), *words)


def test_ranks_whose_python_diverges_are_told_the_first_call_that_differs() -> None:
    finished = run("diverges")
    assert_all_say(finished, "DivergenceError", "programs differ", "rank 0: ", "rank 1: ", "wrong_use.py:", "relu")


@pytest.mark.parametrize(("schedule", "transport", "where"), FAILING)
def test_a_module_that_raises_on_one_rank_stops_all(schedule: str, transport: str, where: str) -> None:
    finished = run_under(schedule, transport, f"raises_in_{where}")
    assert_all_say(finished, f"the fragile module broke in {where}")
    assert "Traceback" in finished[2].stderr
    for other in finished[:2]:
        assert "RemoteError: rank 2 failed" in other.stderr
        assert "Traceback" not in other.stderr


def test_a_bug_in_the_users_own_loop_on_one_rank_stops_all() -> None:
    finished = run("raises_in_user_code")
    assert_all_say(finished, "a bug in the user's own loop")
    assert "RemoteError: rank 0 failed" in finished[1].stderr


@pytest.mark.parametrize(("schedule", "transport"), WAYS)
def test_a_killed_rank_is_named_by_all_others_at_once(schedule: str, transport: str) -> None:
    finished = run_under(schedule, transport, "is_killed")
    assert finished[2].code == -9
    assert_all_say(finished[:2], "RemoteError", "rank 2 died")


@pytest.mark.parametrize(("schedule", "transport"), WAYS)
def test_a_stopped_rank_is_named_by_all_others_within_the_deadline(schedule: str, transport: str) -> None:
    finished = run_under(schedule, transport, "is_stopped", deadline_s=8, stops=2)
    assert finished[2].code in (1, -9)  # the others' failure lets it go on, to end, or to stop once more
    assert_all_say(finished[:2], "rank 2 does not go on", "waited 8 s for", "  try  ")


def test_no_hang_when_one_rank_reads_inside_the_window() -> None:
    assert_all_say(run("reads_alone"), "DivergenceError", "rank 0: end of the step", "wrong_use.py:")


def test_no_hang_when_one_rank_ends_early() -> None:
    finished = run("ends_early")
    assert "rank 1" in finished[0].stderr and finished[0].code != 0

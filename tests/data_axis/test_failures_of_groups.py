"""What goes wrong in one group ends all of them, with its name; no group waits for one that does not come."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.ranks import Finished, run_processes

PROGRAM = Path(__file__).parent / "fail_in_groups.py"


def fail(num_ranks: int, what: str, **environment: str) -> list[Finished]:
    return run_processes(num_ranks, PROGRAM, ["2", what], environment={"FARSPAN_DEADLINE": "60", **environment})


def assert_all_say(finished: list[Finished], *words: str) -> None:
    for rank, process in enumerate(finished):
        assert process.code == 1, f"rank {rank}: {process.stdout}{process.stderr}"
        assert not [word for word in words if word not in process.stderr], f"rank {rank}: {process.stderr}"


def test_an_exception_in_one_group_reaches_the_others() -> None:
    finished = fail(4, "raise")
    assert_all_say(finished, "ValueError: no more data")
    assert all("rank 3 failed" in process.stderr for process in finished[:3])


def test_a_rank_that_is_killed_ends_all_groups() -> None:
    finished = fail(4, "kill")
    assert_all_say(finished[:3], "rank 3 died")


def test_programs_that_differ_within_one_group() -> None:
    assert_all_say(fail(4, "differ"), "the ranks' programs differ at step 2", "whose rank 0 is rank 2 of all")


def test_an_exception_while_gradients_are_on_their_way_ends_all_groups() -> None:
    """The program may catch it, but what it has averaged is not what the other groups have."""
    finished = fail(2, "raise in a step")
    assert_all_say(finished, "ValueError: too large")


def test_a_group_that_steps_less_often() -> None:
    words = "has ended its program", "after 2 steps of optimizers", "fail_in_groups.py", "drop_last=True"
    assert_all_say(fail(2, "fewer steps"), *words)


def test_a_group_that_steps_without_a_backward() -> None:
    """Its next gradients would be averaged with those that the others have of a step before."""
    assert_all_say(fail(2, "no backward"), "after 3 steps of optimizers", "drop_last=True")


def test_a_group_that_steps_with_another_learning_rate() -> None:
    """A schedule that follows the loss of its own group: found before the step, not by the weights that it leaves."""
    assert_all_say(fail(2, "other rate"), "after 2 steps of optimizers (SGD, lr 0.1,", "(SGD, lr 0.05,", "schedules")


def test_ranks_that_give_other_numbers_of_groups() -> None:
    assert_all_say(fail(2, "other number"), "rank 0: data_parallel=2", "rank 1: data_parallel=1")


def test_groups_with_other_models() -> None:
    assert_all_say(fail(2, "other model"), "0.weight: float32[16, 8]", "0.weight: float32[12, 8]")


def test_a_gradient_that_one_rank_of_a_group_reads_alone() -> None:
    assert_all_say(fail(4, "read alone"), "gradients are averaged over the groups")


def test_a_rank_of_another_group_that_stops_is_waited_for_no_longer_than_the_deadline() -> None:
    finished = run_processes(2, PROGRAM, ["2", "stop"], environment={"FARSPAN_DEADLINE": "5"}, stops=1)
    assert finished[0].code == 1
    assert "waited 5 s for rank 1" in finished[0].stderr, finished[0].stderr


@pytest.mark.parametrize(("number", "words"), [(3, "data_parallel=1 or 2"), (0, "from 1"), ("two", "from 1")])
def test_a_number_of_groups_that_cannot_be(number: object, words: str) -> None:
    from farspan.errors import PlanError
    from farspan.execute.data_axis.num_groups import check_num_groups

    with pytest.raises(PlanError, match=words):
        check_num_groups(number, 2)

"""Which micro-batches have split backwards under "auto": few enough that splitting pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.bubble_rates.schedules import Chain, Costs, looped, straight, vee
from hypothesis import given
from tests.schedule.graphs import any_segments

from farspan.schedule import Kind, Task, orders_by_name, split_from, whole_until
from farspan.schedule.timing import simulate_orders

WHOLE, SPLIT = Costs(backward=2), Costs(weight=1)


@pytest.mark.parametrize(
    ("num_ranks", "num_micro_batches", "first"),
    [(2, 2, 0), (2, 8, 6), (2, 16, 14), (4, 8, 0), (4, 32, 28), (8, 8, 0), (8, 16, 0)],
)
def test_where_the_last_ones_are_enough_others_stay_whole(num_ranks: int, num_micro_batches: int, first: int) -> None:
    tasks = straight(num_ranks, num_micro_batches, SPLIT).tasks
    assert split_from("auto", tasks, num_ranks, run_ahead=1) == first
    for other in ("1f1b", "zero-bubble", "gpipe"):
        assert split_from(other, tasks, num_ranks, run_ahead=0) == 0


def test_where_nothing_is_worth_splitting_nothing_is() -> None:
    assert split_from("auto", straight(2, 16, WHOLE).tasks, 2, run_ahead=1) == 0


@pytest.mark.parametrize("chain", [straight(3, 6, SPLIT), vee(2, 6, SPLIT), looped(2, 2, 6, SPLIT)])
def test_a_step_of_whole_backwards_is_one_that_was_never_split(chain: Chain) -> None:
    whole = Chain(ranks=chain.ranks, costs=(WHOLE,) * chain.num_stages, num_micro_batches=6)
    found = whole_until(chain.tasks, 6)
    assert [replace(task, needs=()) for task in found] == [replace(task, needs=()) for task in whole.tasks]
    for task, other in zip(found, whole.tasks, strict=True):  # and after the one before, since gradients add up
        assert set(task.needs) - set(other.needs) <= {
            number for number, each in enumerate(found) if _is_before(each, task)
        }
        assert set(task.needs) >= set(other.needs)
    assert whole_until(chain.tasks, 0) == chain.tasks
    weights = [task.micro_batch for task in whole_until(chain.tasks, 4) if task.kind is Kind.WEIGHT]
    assert set(weights) == {4, 5}


def _is_before(each: Task, task: Task) -> bool:
    return (each.kind, each.level, each.micro_batch) == (Kind.BACKWARD, task.level, task.micro_batch - 1)


@given(any_segments())
def test_any_step_still_runs_with_all_its_work_and_memory(graph) -> None:
    tasks, num_ranks = graph
    for first in range(1 + max((task.micro_batch for task in tasks), default=0) + 1):
        fewer = whole_until(tasks, first)
        assert sum(task.duration for task in fewer) == pytest.approx(sum(task.duration for task in tasks))
        assert sum(task.memory for task in fewer) == pytest.approx(sum(task.memory for task in tasks))
        assert all(need < number for number, task in enumerate(fewer) for need in task.needs)
        assert not any(task.kind is Kind.WEIGHT and task.micro_batch < first for task in fewer)
        assert simulate_orders(fewer, orders_by_name("auto", fewer, num_ranks), 0.0) is not None

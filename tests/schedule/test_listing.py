"""List scheduling: valid on any graph of tasks, and 1F1B on a plain chain."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.schedule import Kind, Limits, Task, list_schedule


def chain(num_stages: int, num_micro_batches: int, *, is_split: bool = False) -> list[Task]:
    """A plain pipeline: F down the stages, B back up, twice as long; or as long, with W as a task of its own."""
    tasks: list[Task] = []
    for micro_batch in range(num_micro_batches):
        for stage in range(num_stages):
            needs = (len(tasks) - 1,) if stage else ()
            tasks.append(
                Task(
                    kind=Kind.FORWARD,
                    rank=stage,
                    micro_batch=micro_batch,
                    level=stage,
                    duration=1,
                    needs=needs,
                    holds=True,
                )
            )
    for micro_batch in range(num_micro_batches):
        for stage in reversed(range(num_stages)):
            own_forward = micro_batch * num_stages + stage
            needs = (own_forward,) if stage == num_stages - 1 else (own_forward, len(tasks) - 1)
            tasks.append(
                Task(
                    kind=Kind.BACKWARD,
                    rank=stage,
                    micro_batch=micro_batch,
                    level=0,
                    duration=1 if is_split else 2,
                    needs=needs,
                    holds=False,
                )
            )
    for index, task in enumerate(list(tasks)):
        if is_split and task.kind is Kind.BACKWARD:
            tasks.append(replace(task, kind=Kind.WEIGHT, duration=1, needs=(index,)))
    return tasks


def names(tasks: list[Task], order: list[int]) -> str:
    return " ".join(f"{tasks[index].kind.value}{tasks[index].micro_batch}" for index in order)


def test_a_chain_is_one_forward_one_backward() -> None:
    tasks = chain(3, 4)
    assert [names(tasks, order) for order in list_schedule(tasks, 3)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_running_ahead_gives_all_but_the_last_rank_one_more_forward() -> None:
    tasks = chain(3, 5)
    assert [names(tasks, order) for order in list_schedule(tasks, 3, run_ahead=1)] == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_fewer_in_flight_than_the_depth_still_ends() -> None:
    tasks = chain(3, 4)
    assert [names(tasks, order) for order in list_schedule(tasks, 3, limits=[Limits(in_flight=1, held=1)] * 3)] == [
        "F0 B0 F1 B1 F2 B2 F3 B3"
    ] * 3


def test_weight_gradients_go_where_nothing_else_could_run() -> None:
    tasks = chain(3, 4, is_split=True)
    assert [names(tasks, order) for order in list_schedule(tasks, 3)] == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 B2 F3 W1 W2 B3 W3",
        "F0 B0 F1 B1 F2 B2 W0 W1 F3 B3 W2 W3",
    ]


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(2, 8), (4, 8), (4, 16), (8, 8)])
def test_split_backwards_leave_the_bubble_of_zb_h1(num_stages: int, num_micro_batches: int) -> None:
    """(p - 1) (F + B - W) instead of 1F1B's (p - 1) (F + B + W); arXiv 2401.10241, table 2."""
    for is_split, bubble in ((False, 3 * (num_stages - 1)), (True, num_stages - 1)):
        tasks = chain(num_stages, num_micro_batches, is_split=is_split)
        orders = list_schedule(tasks, num_stages, run_ahead=1)
        assert duration(tasks, orders) == 3 * num_micro_batches + bubble


def test_the_published_bubble_rate_of_1f1b_and_zb_h1() -> None:
    """The 1.5B model on 8 GPUs, 24 micro-batches; table 5 there: times in ms, and the time a transfer takes."""
    forward, backward, weight, latency = 18.522, 18.086, 9.337, 0.601
    for is_split, rate in ((False, 0.2431), (True, 0.1585)):
        tasks = [
            replace(
                task,
                duration={
                    Kind.FORWARD: forward, Kind.BACKWARD: backward if is_split else backward + weight,
                    Kind.WEIGHT: weight,
                }[task.kind],
            )
            for task in chain(8, 24, is_split=is_split)
        ]  # fmt: skip
        orders = list_schedule(tasks, 8, latency=latency)
        spent = duration(tasks, orders, latency)
        assert abs(1 - 24 * (forward + backward + weight) / spent - rate) < 1e-4


def duration(tasks: list[Task], orders: list[list[int]], latency: float = 0.0) -> float:
    """How long the orders take, when every task runs as early as it can."""
    end: dict[int, float] = {}
    clocks, places = [0.0] * len(orders), [0] * len(orders)
    while len(end) < len(tasks):
        for rank, order in enumerate(orders):
            while places[rank] < len(order) and set(tasks[order[places[rank]]].needs) <= end.keys():
                task = tasks[order[places[rank]]]
                there = [end[need] + (latency if tasks[need].rank != rank else 0) for need in task.needs]
                clocks[rank] = end[order[places[rank]]] = max([clocks[rank], *there]) + task.duration
                places[rank] += 1
    return max(clocks)


@given(st.integers(1, 5), st.integers(1, 10), st.integers(1, 3), st.floats(1, 6), st.sampled_from([0.3, 0.5, 1.0]))
def test_what_a_rank_holds_stays_within_its_limits(
    num_stages: int, num_micro_batches: int, in_flight: int, held: float, share: float
) -> None:
    tasks = chain(num_stages, num_micro_batches, is_split=True)
    limit = Limits(in_flight=in_flight, held=held, weight_share=share)
    for order in list_schedule(tasks, num_stages, limits=[limit] * num_stages):
        count: Counter[Kind] = Counter()
        for index in order:
            count[tasks[index].kind] += 1
            flying = count[Kind.FORWARD] - count[Kind.BACKWARD]
            assert flying <= in_flight
            assert flying + share * (count[Kind.BACKWARD] - count[Kind.WEIGHT]) <= held + 1e-9


def test_forward_only_micro_batches_stream() -> None:
    tasks = [task for task in chain(2, 3) if task.kind is Kind.FORWARD]
    assert [names(tasks, order) for order in list_schedule(tasks, 2)] == ["F0 F1 F2", "F0 F1 F2"]


@st.composite
def any_tasks(draw: st.DrawFn) -> tuple[list[Task], int]:
    num_ranks = draw(st.integers(1, 4))
    num_tasks = draw(st.integers(0, 40))
    tasks = [
        Task(
            kind=draw(st.sampled_from(Kind)),
            rank=draw(st.integers(0, num_ranks - 1)),
            micro_batch=draw(st.integers(0, 5)),
            level=draw(st.integers(0, 4)),
            duration=draw(st.sampled_from([0.5, 1.0, 2.0, 3.0])),
            needs=tuple(sorted(draw(st.sets(st.integers(0, index - 1), max_size=4)))) if index else (),
            holds=draw(st.booleans()),
        )
        for index in range(num_tasks)
    ]
    return tasks, num_ranks


@given(any_tasks())
def test_every_order_is_complete_and_can_run(case: tuple[list[Task], int]) -> None:
    tasks, num_ranks = case
    orders = list_schedule(tasks, num_ranks)
    assert sorted(index for order in orders for index in order) == list(range(len(tasks)))
    assert all(tasks[index].rank == rank for rank, order in enumerate(orders) for index in order)
    # Play it: every rank runs its next task as soon as all that it needs has run. Nothing may be left over.
    done: set[int] = set()
    places = [0] * num_ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order) and set(tasks[order[places[rank]]].needs) <= done:
                done.add(order[places[rank]])
                places[rank] += 1
                moved = True
    assert len(done) == len(tasks), "the orders wait for each other"


@given(st.integers(1, 6), st.integers(1, 12))
def test_no_rank_holds_more_micro_batches_than_its_depth(num_stages: int, num_micro_batches: int) -> None:
    tasks = chain(num_stages, num_micro_batches)
    for rank, order in enumerate(list_schedule(tasks, num_stages)):
        held = most = 0
        for index in order:
            held += 1 if tasks[index].kind is Kind.FORWARD else -1
            most = max(most, held)
        assert most <= num_stages - rank

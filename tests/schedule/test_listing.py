"""List scheduling: valid on any graph of tasks, and 1F1B on a plain chain."""

from __future__ import annotations

from collections import Counter

import pytest
from benchmarks.bubble_rates.schedules import Chain, Costs, straight, vee
from hypothesis import given
from hypothesis import strategies as st
from tests.schedule.orders import limits_of_chain, list_schedule
from tests.schedule.picture import draw, picture_in

from farspan.planner import own_links, simulate
from farspan.schedule import Kind, Limits, Schedule, Task, in_flight_of_1f1b, listing


def chain(num_stages: int, num_micro_batches: int, *, is_split: bool = False) -> list[Task]:
    """A plain pipeline: F down the stages, B back up, twice as long; or as long, with W as a task of its own."""
    costs = Costs(weight=1) if is_split else Costs(backward=2)
    return list(straight(num_stages, num_micro_batches, costs).tasks)


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
    assert [names(tasks, order) for order in list_schedule(tasks, 3, limits=[Limits(in_flight=1)] * 3)] == [
        "F0 B0 F1 B1 F2 B2 F3 B3"
    ] * 3


def test_weight_gradients_go_where_nothing_else_could_run() -> None:
    tasks = chain(3, 4, is_split=True)
    assert [names(tasks, order) for order in list_schedule(tasks, 3, limits=limits_of_chain(tasks, 3))] == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 B2 F3 W1 W2 B3 W3",
        "F0 B0 F1 B1 F2 B2 W0 W1 F3 B3 W2 W3",
    ]


def test_it_is_what_the_docstring_draws() -> None:
    pictures = [draw(ordered(straight(3, 4, costs))) for costs in (Costs(), Costs(weight=1))]
    assert pictures == picture_in(listing.__doc__)


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(2, 8), (4, 8), (4, 16), (8, 8)])
def test_split_backwards_leave_the_bubble_of_zb_h1(num_stages: int, num_micro_batches: int) -> None:
    """(p - 1) (F + B - W) instead of 1F1B's (p - 1) (F + B + W); arXiv 2401.10241, table 2."""
    for costs, bubble in ((Costs(backward=2), 3 * (num_stages - 1)), (Costs(weight=1), num_stages - 1)):
        simulated = simulate(ordered(straight(num_stages, num_micro_batches, costs), run_ahead=1))
        assert simulated.step_time == 3 * num_micro_batches + bubble


def test_the_published_bubble_rate_of_1f1b_and_zb_h1() -> None:
    """The 1.5B model on 8 GPUs, 24 micro-batches; table 5 there: times in ms, and the time a transfer takes."""
    forward, backward, weight, latency = 18.522, 18.086, 9.337, 0.601
    for costs, rate in (
        (Costs(forward=forward, backward=backward + weight), 0.2431),
        (Costs(forward=forward, backward=backward, weight=weight), 0.1585),
    ):
        schedule = ordered(straight(8, 24, costs), latency=latency)
        assert abs(simulate(schedule, link_of=own_links(latency=latency)).bubble_rate - rate) < 1e-4


def ordered(chain: Chain, *, limits: list[Limits] | None = None, run_ahead: int = 0, latency: float = 0.0) -> Schedule:
    limits = limits or limits_of_chain(chain.tasks, chain.num_ranks, run_ahead=run_ahead)
    orders = list_schedule(chain.tasks, chain.num_ranks, limits=limits, latency=latency)
    return Schedule(tasks=chain.tasks, orders=tuple(map(tuple, orders)))


@given(st.integers(1, 5), st.integers(1, 10), st.integers(1, 3), st.floats(1, 6), st.sampled_from([0.3, 0.5, 1.0]))
def test_what_a_rank_holds_stays_within_its_limits(
    num_stages: int, num_micro_batches: int, in_flight: int, held: float, share: float
) -> None:
    tasks = straight(num_stages, num_micro_batches, Costs(weight=1, weight_memory=share)).tasks
    for order in list_schedule(tasks, num_stages, limits=[Limits(in_flight=in_flight, memory=held)] * num_stages):
        count: Counter[Kind] = Counter()
        for index in order:
            count[tasks[index].kind] += 1
            flying = count[Kind.FORWARD] - count[Kind.BACKWARD]
            assert flying <= in_flight
            assert flying + share * (count[Kind.BACKWARD] - count[Kind.WEIGHT]) <= held + 1e-6


def test_as_many_are_in_flight_as_a_rank_is_deep() -> None:
    chain = straight(3, 6)
    assert in_flight_of_1f1b(chain.tasks, 3) == [3, 2, 1]
    assert in_flight_of_1f1b(chain.tasks, 3, run_ahead=1) == [4, 3, 1]


def test_micro_batches_that_are_begun_can_always_be_finished() -> None:
    """A V on two ranks with memory for three halves: a third forward down would leave no room for the way up."""
    chain = vee(2, 4)
    limits = [Limits(in_flight=9, memory=3.0)] * 2
    schedule = ordered(chain, limits=limits)
    simulated = simulate(schedule)
    assert [simulated.peak_memory(rank) for rank in (0, 1)] == [3.0, 3.0]
    assert draw(schedule).splitlines()[0].startswith("rank 0   F0 F1 .. f0 b0")


def test_micro_batches_whose_ways_cross_do_not_take_each_others_memory() -> None:
    """Micro-batch 0 goes from rank 0 to rank 1, micro-batch 1 the other way, and each rank has memory for one."""
    tasks: list[Task] = []
    for micro_batch, ranks in enumerate([(0, 1), (1, 0)]):
        for level, rank in enumerate(ranks):
            tasks.append(task_of(Kind.FORWARD, rank, micro_batch, level, needs=(len(tasks) - 1,) if level else ()))
    for micro_batch, ranks in enumerate([(0, 1), (1, 0)]):
        for level, rank in reversed(list(enumerate(ranks))):
            needs = (2 * micro_batch + level, *((len(tasks) - 1,) if level == 0 else ()))
            tasks.append(task_of(Kind.BACKWARD, rank, micro_batch, level, needs=needs))
    orders = list_schedule(tasks, 2, limits=[Limits(in_flight=9, memory=1.0)] * 2)
    assert [names(tasks, order) for order in orders] == ["F0 B0 F1 B1"] * 2


def task_of(kind: Kind, rank: int, micro_batch: int, level: int, *, needs: tuple[int, ...]) -> Task:
    return Task(
        kind=kind,
        rank=rank,
        micro_batch=micro_batch,
        level=level,
        duration=1,
        needs=needs,
        holds=kind is Kind.FORWARD,
        memory=1.0 if kind is Kind.FORWARD else -1.0,
    )


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
    # Simulation it: every rank runs its next task as soon as all that it needs has run. Nothing may be left over.
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


def layers(num_layers: int, stages: int) -> list[Task]:
    """Forwards of one micro-batch: each layer is run by two ranks together, which exchange what each has behind it."""
    tasks: list[Task] = []
    for stage in range(stages):
        for _ in range(num_layers):
            before = tuple(range(max(0, len(tasks) - 2), len(tasks)))
            for member in range(2):
                rank = 2 * stage + member
                level = len(tasks) // 2
                tasks.append(
                    Task(
                        kind=Kind.FORWARD,
                        rank=rank,
                        micro_batch=0,
                        level=level,
                        duration=1.0,
                        needs=before,
                        holds=True,
                        team=2 * stage,
                    )
                )
    return tasks


@pytest.mark.parametrize("num_layers", [1, 7])
def test_ranks_that_run_layers_together_are_one_stage_of_two_micro_batches(num_layers: int) -> None:
    """Each wait for the other member counted as a stage, so that a stage of seven layers took seven micro-batches."""
    assert in_flight_of_1f1b(layers(num_layers, 1), 2) == [2, 2]
    assert in_flight_of_1f1b(layers(num_layers, 3), 6) == [4, 4, 3, 3, 2, 2]

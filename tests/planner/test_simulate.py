"""Simulated steps, against small cases worked out by hand."""

from __future__ import annotations

import pytest
from benchmarks.bubble_rates.schedules import Chain, Costs, one_f_one_b, straight, zb_h1

from farspan.errors import PlanError
from farspan.planner import Link, own_links, simulate
from farspan.schedule import Kind, Schedule, Task


def forward(
    rank: int, micro_batch: int = 0, *, needs: tuple[int, ...] = (), size: float = 0.0, time: float = 1
) -> Task:
    return Task(
        kind=Kind.FORWARD,
        rank=rank,
        micro_batch=micro_batch,
        level=0,
        duration=time,
        needs=needs,
        holds=False,
        output_bytes=tuple((other, size) for other in range(4)),
    )


def schedule(tasks: list[Task], *orders: tuple[int, ...]) -> Schedule:
    return Schedule(tasks=tuple(tasks), orders=orders)


def test_a_pipeline_with_latency() -> None:
    #   rank 0   F0 F1 .... B0 -- .. B1 --      a transfer takes half a unit
    #   rank 1   ... F0 B0 -- F1 B1 --
    chain = straight(2, 2, Costs(backward=2))
    simulated = simulate(one_f_one_b(chain), link_of=own_links(latency=0.5))
    starts = {
        (task.kind.value, task.rank, task.micro_batch): start
        for task, start in zip(chain.tasks, simulated.starts, strict=True)
    }
    assert starts == {
        ("F", 0, 0): 0.0,
        ("F", 0, 1): 1.0,
        ("F", 1, 0): 1.5,
        ("B", 1, 0): 2.5,
        ("F", 1, 1): 4.5,
        ("B", 0, 0): 5.0,
        ("B", 1, 1): 5.5,
        ("B", 0, 1): 8.0,
    }
    assert simulated.step_time == 10.0
    assert [simulated.busy(rank) for rank in (0, 1)] == [6.0, 6.0]
    assert [simulated.span(rank) for rank in (0, 1)] == [10.0, 6.0]
    assert [simulated.idle(rank) for rank in (0, 1)] == [4.0, 0.0]
    assert simulated.bubble_rate == pytest.approx(1 - 12 / 20)


def test_a_message_takes_its_size_over_the_bandwidth_and_then_the_latency() -> None:
    tasks = [forward(0, size=6.0), forward(1, needs=(0,))]
    simulated = simulate(schedule(tasks, (0,), (1,)), link_of=own_links(latency=0.25, bandwidth=2.0))
    assert simulated.starts == (0.0, 1 + 3 + 0.25)
    (transfer,) = simulated.transfers
    assert (transfer.start, transfer.free, transfer.end) == (1.0, 4.0, 4.25)


def test_a_shared_link_carries_one_message_after_another() -> None:
    """Ranks 0 and 1 lie on one host and send to rank 2 through one cable; latency does not occupy it."""
    tasks = [forward(0, size=4.0), forward(1, size=4.0, time=2), forward(2, needs=(0,)), forward(2, needs=(1,))]
    orders = schedule(tasks, (0,), (1,), (2, 3))
    cable = Link(name="cable", latency=1.0, bandwidth=2.0)
    shared = simulate(orders, link_of=lambda source, destination: cable)
    assert shared.starts[2:] == (1 + 2 + 1, 1 + 2 + 2 + 1)
    alone = simulate(orders, link_of=own_links(latency=1.0, bandwidth=2.0))
    assert alone.starts[2:] == (1 + 2 + 1, 2 + 2 + 1)


def test_a_task_sends_once_to_each_rank_that_needs_it() -> None:
    tasks = [
        forward(0, size=1.0),
        forward(1, needs=(0,)),
        forward(1, needs=(0,)),
        forward(2, needs=(0,)),
        forward(0, needs=(0,)),
    ]
    simulated = simulate(schedule(tasks, (0, 4), (1, 2), (3,)), link_of=own_links(bandwidth=1.0))
    assert [transfer.message.channel[:2] for transfer in simulated.transfers] == [(0, 1), (0, 2)]
    assert [transfer.message.users for transfer in simulated.transfers] == [(1, 2), (3,)]
    assert simulated.starts == (0.0, 2.0, 3.0, 2.0, 1.0)


@pytest.mark.parametrize(
    ("lookahead", "starts"),
    [
        (None, [3.0, 4.0, 5.0]),  # rank 1 is ready for all from the start: one transfer behind the other
        (1, [3.0, 4.0, 6.0]),  # it asks for the third when it comes to the second, at 4
        (0, [3.0, 6.0, 9.0]),  # it asks for a message when it has nothing else to do, and waits 2 units each time
    ],
)
def test_a_message_travels_when_its_receive_is_posted(lookahead: int | None, starts: list[float]) -> None:
    tasks = [forward(0, number) for number in range(3)]
    tasks += [forward(1, number, needs=(number,)) for number in range(3)]
    simulated = simulate(schedule(tasks, (0, 1, 2), (3, 4, 5)), link_of=own_links(latency=2.0), lookahead=lookahead)
    assert list(simulated.starts[3:]) == starts


def test_what_is_used_out_of_order_is_received_in_order() -> None:
    tasks = [forward(0, 0), forward(0, 1), forward(1, 0, needs=(0,)), forward(1, 1, needs=(1,))]
    simulated = simulate(schedule(tasks, (0, 1), (3, 2)), lookahead=0)
    assert [transfer.message.task for transfer in simulated.transfers] == [0, 1]
    assert simulated.starts == (0.0, 1.0, 3.0, 2.0)


def test_memory_is_taken_when_a_forward_begins_and_given_back_when_a_backward_has_ended() -> None:
    chain = straight(2, 3, Costs(weight=1, memory=10.0, weight_memory=4.0))
    simulated = simulate(zb_h1(chain))
    # rank 0: F0 F1 B0 W0 F2 B1 W1 B2 W2      rank 1: F0 B0 F1 B1 W0 F2 B2 W1 W2
    assert [simulated.peak_memory(rank) for rank in (0, 1)] == [20.0, 14.0]
    assert [simulated.peak_micro_batches(rank) for rank in (0, 1)] == [2, 2]


def test_unequal_stages_wait_for_the_slowest() -> None:
    costs = (Costs(forward=1, backward=2), Costs(forward=2, backward=4))
    simulated = simulate(one_f_one_b(Chain(ranks=(0, 1), costs=costs, num_micro_batches=3)))
    assert simulated.step_time == 1 + 3 * 6 + 2
    assert simulated.longest_span == 21
    assert simulated.bubble_rate == pytest.approx(1 - (9 + 18) / 42)


def test_an_empty_step_takes_no_time() -> None:
    simulated = simulate(schedule([], (), ()))
    assert (simulated.step_time, simulated.bubble_rate, simulated.peak_memory(0), simulated.span(1)) == (
        0.0,
        0.0,
        0.0,
        0.0,
    )


def test_orders_that_wait_for_each_other_are_an_error_that_names_them() -> None:
    chain = straight(2, 2)
    orders = list(one_f_one_b(chain).orders)
    orders[1] = (*reversed(orders[1]),)
    with pytest.raises(PlanError) as error:
        simulate(Schedule(tasks=chain.tasks, orders=tuple(orders)))
    assert str(error.value) == (
        "the schedule cannot end: 2 of 8 tasks have run.\n"
        "  why  rank 0 waits at B0 of rank 0 (level 0) for B0 of rank 1 (level 1);\n"
        "       rank 1 waits at B1 of rank 1 (level 1) for F1 of rank 1 (level 1)\n"
        "  try  orders with each task after all that it needs: schedule.orders_by_name(name, tasks, num_ranks)"
    )


def test_orders_that_are_not_complete_are_errors() -> None:
    tasks = [forward(0), forward(1, needs=(0,))]
    for orders, words in (
        (((0,), ()), "nobody runs F0 of rank 1"),
        (((0, 1), ()), "F0 of rank 1 .* is not rank 0's"),
        (((0, 0), (1,)), "F0 of rank 0 .* comes twice"),
    ):
        with pytest.raises(PlanError, match=words):
            simulate(schedule(tasks, *orders))

"""What holds for every schedule of every graph of segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from benchmarks.bubble_rates.schedules import (
    Chain,
    Costs,
    automatic,
    gpipe,
    interleaved,
    looped,
    one_f_one_b,
    straight,
    vee,
    zb_1p,
    zb_2p,
    zb_h1,
    zb_v,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.graphs import any_segments, capacity
from tests.schedule.orders import list_schedule

from farspan.errors import PlanError
from farspan.planner import own_links, simulate
from farspan.schedule import Limits, Schedule, Task, channels_of
from farspan.schedule.timing import simulate_orders

_NAMED: list[tuple[Callable[[Chain], Schedule], Callable[..., Chain]]] = [
    (gpipe, straight),
    (one_f_one_b, straight),
    (interleaved, lambda ranks, numbers, costs: looped(ranks, 3, numbers, costs)),
    (zb_h1, straight),
    (zb_1p, straight),
    (zb_2p, straight),
    (zb_v, vee),
]


def as_schedule(tasks: Sequence[Task], orders: Sequence[Sequence[int]]) -> Schedule:
    return Schedule(tasks=tuple(tasks), orders=tuple(map(tuple, orders)))


def check(schedule: Schedule, latency: float) -> None:
    """Complete, and it ends: with all receives posted, and with each posted as late as possible."""
    assert sorted(index for order in schedule.orders for index in order) == list(range(len(schedule.tasks)))
    for lookahead in (None, 0, 2):
        simulated = simulate(schedule, link_of=own_links(latency=latency, bandwidth=16.0), lookahead=lookahead)
        for index, task in enumerate(schedule.tasks):
            assert all(simulated.ends[need] <= simulated.starts[index] for need in task.needs)
        for order in schedule.orders:
            assert all(simulated.ends[a] <= simulated.starts[b] for a, b in pairwise(order))


@given(any_segments(), st.integers(0, 2), st.sampled_from([0.0, 0.3, 2.0]))
def test_complete_and_nobody_waits_for_ever(case: tuple[list[Task], int], run_ahead: int, latency: float) -> None:
    tasks, num_ranks = case
    check(as_schedule(tasks, list_schedule(tasks, num_ranks, run_ahead=run_ahead, latency=latency)), latency)


@given(any_segments(), st.sampled_from([1.0, 1.5, 2.0]), st.integers(1, 6))
def test_no_rank_holds_more_memory_than_it_has(case: tuple[list[Task], int], factor: float, in_flight: int) -> None:
    """And the least that one micro-batch needs on each rank is enough for all of them."""
    tasks, num_ranks = case
    memory = [factor * least for least in capacity(tasks, num_ranks)]
    limits = [Limits(in_flight=in_flight, memory=size) for size in memory]
    schedule = as_schedule(tasks, list_schedule(tasks, num_ranks, limits=limits))
    check(schedule, 0.0)
    simulated = simulate(schedule)
    assert all(simulated.peak_memory(rank) <= size + 1e-6 for rank, size in enumerate(memory))


@settings(max_examples=30)
@given(any_segments(), st.sampled_from([1.0, 1.5, 2.0]), st.sampled_from([0.0, 0.3]))
def test_the_automatic_schedule_keeps_its_memory(case: tuple[list[Task], int], factor: float, latency: float) -> None:
    tasks, num_ranks = case
    memory = [factor * least for least in capacity(tasks, num_ranks)]
    schedule = automatic(tasks, memory=memory, latency=latency)
    check(schedule, latency)
    simulated = simulate(schedule, link_of=own_links(latency=latency))
    assert all(simulated.peak_memory(rank) <= size + 1e-6 for rank, size in enumerate(memory))


@given(any_segments())
def test_too_little_memory_is_said(case: tuple[list[Task], int]) -> None:
    tasks, num_ranks = case
    least = capacity(tasks, num_ranks)
    if any(least):
        limits = [Limits(in_flight=9, memory=size - 0.5 if size else 0.0) for size in least]
        with pytest.raises(PlanError, match="no order of the tasks keeps rank"):
            list_schedule(tasks, num_ranks, limits=limits)


@given(any_segments(), st.integers(0, 3))
def test_both_ends_of_a_channel_agree(case: tuple[list[Task], int], lookahead: int) -> None:
    tasks, num_ranks = case
    schedule = as_schedule(tasks, list_schedule(tasks, num_ranks))
    place = {index: place for order in schedule.orders for place, index in enumerate(order)}
    channels = channels_of(schedule, lookahead=lookahead)
    for channel, messages in channels.items():
        sent = [place[message.task] for message in messages]
        posted = [message.posted_at for message in messages]
        assert sent == sorted(set(sent))
        assert posted == sorted(posted)
        for message in messages:
            assert tasks[message.task].rank == channel.source != channel.destination
            assert all(tasks[user].rank == channel.destination for user in message.users)
            assert message.posted_at <= max(0, min(place[user] for user in message.users) - lookahead)
    crossings = {(need, task.rank) for task in tasks for need in task.needs if tasks[need].rank != task.rank}
    assert crossings == {(message.task, key.destination) for key, messages in channels.items() for message in messages}


@settings(max_examples=60)
@given(st.sampled_from(_NAMED), st.integers(1, 4), st.integers(1, 9), st.sampled_from([0.0, 0.3]))
def test_named_schedules_run_with_buffers_of_one_message(
    named: tuple[Callable[[Chain], Schedule], Callable[..., Chain]], num_ranks: int, num_micro_batches: int, wait: float
) -> None:
    generator, shape = named
    chain = shape(num_ranks, num_micro_batches, Costs(forward=1.0, backward=1.2, weight=0.7))
    schedule = generator(chain)
    check(schedule, wait)
    for channel, messages in channels_of(schedule).items():
        order = schedule.orders[channel.destination]
        for earlier, later in pairwise(messages):
            # used in the order of sending: the buffer of one is free before the next is posted
            assert max(map(order.index, earlier.users)) < later.posted_at


@given(any_segments(), st.sampled_from([0.0, 0.3, 2.0]))
def test_the_simulator_agrees_with_the_scheduler_where_links_are_free(
    case: tuple[list[Task], int], latency: float
) -> None:
    tasks, num_ranks = case
    orders = list_schedule(tasks, num_ranks, latency=latency)
    times = simulate_orders(tasks, orders, latency)
    assert times is not None
    simulated = simulate(as_schedule(tasks, orders), link_of=own_links(latency=latency))
    assert simulated.ends == pytest.approx(times.ends)
    assert simulated.longest_span == pytest.approx(times.cost)

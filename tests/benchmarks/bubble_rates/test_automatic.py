"""Searching for a short schedule, and making one shorter."""

from __future__ import annotations

from itertools import permutations, product

import pytest
from benchmarks.bubble_rates.schedules import Chain, Costs, automatic, one_f_one_b, straight, vee, zb_2p, zb_h1, zb_v
from benchmarks.bubble_rates.schedules.improve import improve

from farspan.schedule.timing import simulate_orders


def cost(chain: Chain, orders: object, latency: float = 0.0) -> float:
    times = simulate_orders(chain.tasks, orders, latency)  # type: ignore[arg-type]
    assert times is not None
    return times.cost


def test_orders_that_wait_for_each_other_have_no_times() -> None:
    chain = straight(2, 2)
    first, second = one_f_one_b(chain).orders
    assert simulate_orders(chain.tasks, [first, second[::-1]], 0.0) is None


def test_weight_gradients_give_way_to_what_the_longest_rank_waits_for() -> None:
    """1F1B with the weight gradients right after each backward becomes as short as ZB-H1, within the same memory."""
    chain = straight(3, 6, Costs(weight=1))
    early = one_f_one_b(chain).orders
    assert cost(chain, early) == 22
    better = improve(chain.tasks, early, memory=[3.0] * 3)
    assert cost(chain, better) == cost(chain, zb_h1(chain).orders) == 20
    assert sorted(map(sorted, better)) == sorted(map(sorted, early))
    assert all(fits(chain, tuple(order), 3.0) for order in better)


def test_no_effort_no_change() -> None:
    chain = straight(3, 6, Costs(weight=1))
    orders = zb_h1(chain).orders
    assert improve(chain.tasks, orders, memory=[3.0] * 3, effort=0) == [list(order) for order in orders]


@pytest.mark.parametrize("memory", [1.0, 2.0])
def test_it_finds_the_best_there_is_on_two_ranks(memory: float) -> None:
    """Against all orders of two micro-batches on two ranks."""
    chain = straight(2, 2, Costs(forward=2, backward=3, weight=2, weight_memory=0.5))
    own = [[index for index, task in enumerate(chain.tasks) if task.rank == rank] for rank in (0, 1)]
    allowed = [[order for order in permutations(tasks) if fits(chain, order, memory)] for tasks in own]
    best = min(
        times.cost for orders in product(*allowed) if (times := simulate_orders(chain.tasks, orders, 0.5)) is not None
    )
    found = automatic(chain.tasks, memory=[memory] * 2, latency=0.5)
    assert cost(chain, found.orders, 0.5) == best


def fits(chain: Chain, order: tuple[int, ...], memory: float) -> bool:
    """In the order of micro-batches for each kind, and within the memory."""
    held, seen = 0.0, set[int]()
    for index in order:
        task = chain.tasks[index]
        held += task.memory
        if held > memory or any(chain.tasks[need].rank == task.rank and need not in seen for need in task.needs):
            return False
        seen.add(index)
    return True


def test_it_reaches_the_bound_of_the_published_case_with_twice_the_memory() -> None:
    """The 1.5B model of arXiv 2401.10241, table 5, 24 micro-batches. Rank 0 cannot begin and end its step in less than
    the first forward down to the last rank, that one's forwards and backwards, and the last backward up with its weight
    gradients: a bubble of 0.0433. Without improvement it is 0.0436.
    """
    forward, backward, weight, latency = 18.522, 18.086, 9.337, 0.601
    chain = straight(8, 24, Costs(forward=forward, backward=backward, weight=weight, weight_memory=0.366))
    hops = 7 * (forward + backward + 2 * latency)
    assert cost(chain, zb_2p(chain, latency=latency).orders, latency) == pytest.approx(
        hops + 24 * (forward + backward) + weight
    )


def test_it_takes_any_shape() -> None:
    """A V with the memory of ZB-V is about as short as ZB-V, and so are stages of which one is slow."""
    chain = vee(3, 6, Costs(weight=1))
    found = automatic(chain.tasks, memory=[6.0] * 3)
    assert cost(chain, found.orders) <= 1.03 * cost(chain, zb_v(chain).orders)
    slow = Chain(
        ranks=(0, 1, 2), costs=(Costs(weight=1), Costs(forward=2, weight=2), Costs(weight=1)), num_micro_batches=8
    )
    found = automatic(slow.tasks, memory=[6.0] * 3)
    assert cost(slow, found.orders) == 8 * 5

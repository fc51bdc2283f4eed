from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.errors import PlanError
from farspan.planner import partition

COSTS = st.lists(st.integers(0, 12), min_size=1, max_size=9)


def _sums(costs: Sequence[float], parts: Sequence[int]) -> list[float]:
    return [sum(cost for cost, at in zip(costs, parts, strict=True) if at == part) for part in range(parts[-1] + 1)]


def _all_partitions(num_items: int, num_parts: int) -> Iterator[list[int]]:
    for cuts in combinations(range(1, num_items), num_parts - 1):
        yield [sum(cut <= item for cut in cuts) for item in range(num_items)]


@given(COSTS, st.data())
def test_largest_part_is_the_smallest_possible_and_the_rest_even(costs: list[int], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(costs)))

    def quality(parts: list[int]) -> tuple[float, float, int]:
        sums = _sums(costs, parts)
        lengths = [parts.count(part) for part in range(num_parts)]
        return max(sums), sum(size**2 for size in sums), sum(length**2 for length in lengths)

    found = partition(costs, num_parts)
    assert quality(found) == min(map(quality, _all_partitions(len(costs), num_parts)))


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=40), st.data())
def test_parts_are_contiguous_and_never_empty(costs: list[float], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(costs)))
    parts = partition(costs, num_parts)
    assert len(parts) == len(costs)
    assert parts[0] == 0
    assert parts[-1] == num_parts - 1
    assert all(later - earlier in (0, 1) for earlier, later in pairwise(parts))


@given(COSTS, st.data())
def test_with_slack_cuts_are_as_cheap_as_the_slack_allows(costs: list[int], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(costs)))
    cut_costs = data.draw(st.lists(st.integers(0, 3), min_size=len(costs), max_size=len(costs)))

    def cut_cost(parts: list[int]) -> int:
        return sum(cut_costs[item] for item in range(1, len(parts)) if parts[item] != parts[item - 1])

    found = partition(costs, num_parts, cut_costs=cut_costs, slack=0.25)
    everything = list(_all_partitions(len(costs), num_parts))
    limit = 1.25 * min(max(_sums(costs, parts)) for parts in everything)
    assert max(_sums(costs, found)) <= limit
    assert cut_cost(found) == min(cut_cost(parts) for parts in everything if max(_sums(costs, parts)) <= limit)


def test_slack_is_not_spent_where_it_buys_nothing() -> None:
    assert partition([10, 1, 10], 2, slack=0.5) == partition([10, 1, 10], 2)


def test_a_large_model_is_cut_quickly() -> None:
    parts = partition([1.0 + item % 7 for item in range(600)], 32)
    assert max(_sums([1.0 + item % 7 for item in range(600)], parts)) <= 80


@pytest.mark.parametrize(("costs", "num_parts"), [([1.0], 2), ([], 1), ([1.0], 0)])
def test_fewer_items_than_parts_is_a_plan_error(costs: list[float], num_parts: int) -> None:
    with pytest.raises(PlanError, match="cannot be cut"):
        partition(costs, num_parts)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_none_is_a_plan_error(cost: float) -> None:
    with pytest.raises(PlanError, match="the cost of item 1"):
        partition([1.0, cost], 1)

"""The number of groups, and the widths of stages, that the planner chooses."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.errors import PlanError
from farspan.planner import Unit, auto_plan
from farspan.planner.mesh import Machine, best_groups
from farspan.planner.mesh.widths import cuts_and_widths

UNITS = [Unit(name=f"blocks.{number}", cost=1e6, parameter_bytes=4_000_000) for number in range(8)]
ROOMY = Machine(memory_bytes=1e12, flops_per_s=1e11, bytes_per_s=1e10)


def slowest(costs: list[float], ends: tuple[int, ...], widths: list[int]) -> float:
    """Of stages that begin and end there."""
    return max(sum(costs[begin:end]) / width for (begin, end), width in zip(pairwise(ends), widths, strict=True))


@given(st.lists(st.integers(1, 9).map(float), min_size=2, max_size=5), st.integers(1, 3), st.integers(0, 3))
def test_no_other_cuts_and_widths_make_the_slowest_stage_faster(costs: list[float], num_stages: int, more: int) -> None:
    num_stages = min(num_stages, len(costs))
    num_ranks = num_stages + more
    stage_of, widths = cuts_and_widths(costs, num_stages, num_ranks)
    assert sorted(set(stage_of)) == list(range(num_stages)) and stage_of == sorted(stage_of)
    assert sum(widths) == num_ranks and min(widths) >= 1
    ends = (0, *(stage_of.index(stage) for stage in range(1, num_stages)), len(costs))
    everything = [
        slowest(costs, (0, *cuts, len(costs)), [b - a for a, b in pairwise((0, *shares, num_ranks))])
        for cuts in combinations(range(1, len(costs)), num_stages - 1)
        for shares in combinations(range(1, num_ranks), num_stages - 1)
    ]
    assert slowest(costs, ends, widths) == pytest.approx(min(everything))


def test_fewer_stages_than_ranks_give_the_slow_stage_several() -> None:
    units = [Unit(name="slow", cost=6.0), Unit(name="fast", cost=2.0)]
    plan = auto_plan(units, num_stages=2, devices=[f"rank:{rank}" for rank in range(4)])
    assert plan.stages == ("rank:0+rank:1+rank:2", "rank:3")
    assert plan.placement == {"slow": 0, "fast": 1}


def test_groups_win_where_they_fit_and_the_link_is_fast() -> None:
    assert best_groups(UNITS, 4, ROOMY, num_micro_batches=8).num_groups == 4


def test_a_model_that_no_rank_can_hold_is_divided() -> None:
    """Weights, gradients and two states of Adam: 128 MB in all."""
    assert best_groups(UNITS, 4, replace(ROOMY, memory_bytes=70e6), num_micro_batches=8).num_groups == 2
    assert best_groups(UNITS, 4, replace(ROOMY, memory_bytes=35e6), num_micro_batches=8).num_groups == 1
    with pytest.raises(PlanError, match="no number of groups fits 4 ranks"):
        best_groups(UNITS, 4, replace(ROOMY, memory_bytes=20e6), num_micro_batches=8)


def test_a_slow_link_between_groups_makes_one_pipeline_the_fastest() -> None:
    assert best_groups(UNITS, 4, replace(ROOMY, bytes_per_s=1e5), num_micro_batches=8).num_groups == 1
    numbers = [
        best_groups(UNITS, 4, replace(ROOMY, bytes_per_s=rate), num_micro_batches=8).num_groups
        for rate in (1e5, 1e7, 1e9)
    ]
    assert numbers == sorted(numbers)


def test_each_rank_may_have_one_unit() -> None:
    small = replace(ROOMY, memory_bytes=2e7)  # each unit takes 1.6e7 with its gradient and the optimizer's state
    assert best_groups(UNITS[:4], 4, small, num_micro_batches=1).num_groups == 1

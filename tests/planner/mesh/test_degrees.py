"""The number of ranks for each layer that the planner chooses."""

from __future__ import annotations

from typing import Any

import pytest

from farspan.errors import PlanError
from farspan.planner import Unit
from farspan.planner.mesh import Machine, best_degree

UNITS = [Unit(name=f"blocks.{number}", cost=1e6, parameter_bytes=4_000_000) for number in range(4)]
WAYS: Any = {"num_micro_batches": 8, "num_sums": 8, "summed_bytes": 4e3}


def machine(**others: float) -> Machine:
    return Machine(**{"memory_bytes": 1e12, "flops_per_s": 1e11, "bytes_per_s": 1e10, **others})


def test_a_slow_link_makes_a_pipeline_and_a_fast_one_splits_layers() -> None:
    assert best_degree(UNITS, 4, machine(bytes_per_s=1e7), **WAYS).degree == 1
    assert (
        best_degree(UNITS, 4, machine(bytes_per_s=1e14, flops_per_s=1e8), **{**WAYS, "num_micro_batches": 1}).degree
        == 4
    )
    degrees = [
        best_degree(UNITS, 4, machine(bytes_per_s=rate, flops_per_s=1e9), **WAYS).degree for rate in (1e6, 1e9, 1e13)
    ]
    assert degrees == sorted(degrees)


def test_few_blocks_leave_nothing_but_layers_to_divide() -> None:
    assert best_degree(UNITS[:1], 4, machine(bytes_per_s=1e7), **WAYS).degree == 4


def test_what_a_rank_cannot_hold_is_divided() -> None:
    """One block is twice as large as a rank's memory lets it be."""
    units = [Unit(name="large", cost=1.0, parameter_bytes=8_000_000), *UNITS[:3]]
    slow = {"bytes_per_s": 1e6}
    assert best_degree(units, 4, machine(**slow), **WAYS).degree == 1
    found = best_degree(units, 4, machine(memory_bytes=24e6, **slow), **WAYS)
    assert found.degree == 2 and found.held_bytes <= 24e6
    with pytest.raises(PlanError, match="no number of ranks for each layer fits 4 ranks"):
        best_degree(units, 4, machine(memory_bytes=1e6, **slow), **WAYS)

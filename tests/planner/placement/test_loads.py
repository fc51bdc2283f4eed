"""What crosses the borders of stages, against its definition, for every stage of random graphs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.planner.partition_dp.crossings import Crossings
from farspan.planner.partition_dp.lattice import all_prefixes, make_lattice

PINS = st.lists(st.sets(st.integers(0, 4), min_size=2, max_size=4), max_size=8)
BEFORE = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8)


@settings(max_examples=60, deadline=None)
@given(PINS, BEFORE)
def test_a_value_crosses_a_stage_that_has_some_but_not_all_of_its_pins(
    pins: list[set[int]], before: list[tuple[int, int]]
) -> None:
    prefixes = all_prefixes(5, [(a, b) for a, b in before if a < b], limit=1_000)
    assert prefixes is not None
    lattice = make_lattice(5, prefixes, is_complete=True)
    costs = np.array([[2.0**index, 1.0] for index in range(len(pins))]).reshape(-1, 2)
    crossings = Crossings(lattice, [sorted(each) for each in pins], costs)
    for start in range(len(lattice.prefixes)):
        ends = lattice.within(start, np.arange(start + 1, len(lattice.prefixes)))
        for end, found in zip(ends, crossings.between(start, ends), strict=True):
            stage = set(lattice.difference(start, int(end)))
            expected = sum((costs[i] for i, each in enumerate(pins) if each & stage and each - stage), np.zeros(2))
            assert np.allclose(found, expected)

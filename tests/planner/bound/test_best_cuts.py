"""Which stages are possible within a step, by what there is before them and after them."""

from __future__ import annotations

import numpy as np
import pytest

from farspan.planner.bound.best_cuts import Stages, _Possible


@pytest.mark.parametrize(
    ("ahead", "waits", "after"), [(6.0, 0.0, 0.0), (0.0, 10.0, 0.0), (0.0, 0.0, 9.0), (5.0, 0.0, 4.0), (0.0, 10.0, 3.0)]
)
def test_a_stage_is_possible_up_to_what_a_step_leaves_beside_it(ahead: float, waits: float, after: float) -> None:
    """Four micro-batches in 20 s, of each a forward of 1 s and a backward of 2.5 s, 1.5 s of which others wait for."""
    stages = Stages(
        starts=np.array([1]),
        ends=np.array([2]),
        forward_s=np.array([1.0]),
        backward_s=np.array([2.5]),
        returned_s=np.array([1.5]),
        whole_s=np.array([3.5]),
    )
    possible = _Possible(stages, 20.0, 4, by_end=True)

    def can_be(more_s: float) -> bool:
        sums = [ahead, waits, after]
        sums[max(number for number, each in enumerate(sums) if each)] += more_s
        return bool(possible.within(*[np.full((3, 1), each) for each in sums]).can_be.any())

    assert can_be(0.0)
    assert not can_be(0.25)

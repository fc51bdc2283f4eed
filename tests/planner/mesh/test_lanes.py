"""The number of micro-batches: more of them wait less, and each of them costs something."""

from __future__ import annotations

import pytest

from farspan.planner.mesh import ChainStage, best_lanes, chain_step, seconds_of_work
from farspan.planner.mesh.chain_step import _sent

LARGE = [(1e11, 1e8, 1e6)] * 10
SMALL = [(1e4, 1e4, 1e3)] * 10


@pytest.mark.parametrize("num_micro_batches", [1, 2, 5, 8])
def test_a_row_of_equal_stages_takes_what_1f1b_takes(num_micro_batches: int) -> None:
    """(m + n - 1) forwards and backwards, without messages."""
    for num_stages in (1, 2, 4):
        stages = [ChainStage(forward_s=1.0, backward_s=2.0)] * num_stages
        assert chain_step(stages, num_micro_batches).step_time == 3.0 * (num_micro_batches + num_stages - 1)


def test_two_ranks_take_the_micro_batches_of_a_slow_stage_in_turn() -> None:
    fast = ChainStage(forward_s=1.0, backward_s=2.0)
    slow, wide = [ChainStage(forward_s=2.0, backward_s=4.0, width=width) for width in (1, 2)]
    assert chain_step([slow, fast], 12).step_time >= 12 * 6.0
    assert chain_step([wide, fast], 12).step_time <= 12 * 3.0 + 9.0


def test_much_work_is_cut_and_little_stays_whole() -> None:
    large = best_lanes(seconds_of_work(LARGE, "cpu"), [0.5, 0.5], 64)
    small = best_lanes(seconds_of_work(SMALL, "cpu"), [0.5, 0.5], 64)
    assert (large.number, small.number) == (16, 1)
    assert large.gain > 1.7 and small.gain == 1.0


def test_weights_that_are_moved_for_each_micro_batch_keep_their_number_low() -> None:
    heavy = [(flops, rows, 2e9) for flops, rows, _ in LARGE]
    numbers = [best_lanes(seconds_of_work(work, "cpu"), [0.5, 0.5], 64).number for work in (heavy, LARGE)]
    assert numbers[0] < numbers[1]


def test_each_micro_batch_has_two_rows_and_their_number_divides_the_batch() -> None:
    assert best_lanes(seconds_of_work(LARGE, "cpu"), [0.5, 0.5], 6).number == 3
    assert 48 % best_lanes(seconds_of_work(LARGE, "cpu"), [0.5, 0.5], 48).number == 0
    assert best_lanes(seconds_of_work(LARGE, "cpu"), [1.0], 64).number == 1
    assert best_lanes(seconds_of_work(LARGE, "cpu"), [1.0], 64, widths=[2]).number > 1


def test_a_stage_sends_to_the_rank_that_takes_the_micro_batch() -> None:
    stages = [ChainStage(forward_s=1.0, backward_s=2.0, width=width, sent_bytes=10.0 * width) for width in (1, 3, 2)]
    first = [0, 1, 4, 6]
    assert _sent(stages, first, 0, 5, is_forward=True) == ((1 + 2, 10.0),)
    assert _sent(stages, first, 1, 5, is_forward=True) == ((4 + 1, 30.0),)
    assert _sent(stages, first, 2, 4, is_forward=False) == ((1 + 1, 30.0),)
    assert _sent(stages, first, 2, 4, is_forward=True) == _sent(stages, first, 0, 4, is_forward=False) == ()

"""When a change of speeds is one that has lasted: a function of what all ranks are given."""

from __future__ import annotations

import pytest

from farspan.execute.exchange import PaceNote
from farspan.place.repartition.slowdown import Change, Slowdowns

HOLD_S = 30.0
STEP_S = 1.0


def step(*ratios: float, usual_s: float = 0.8 * STEP_S, span_s: float = STEP_S) -> list[PaceNote]:
    """A step in which each rank takes so many times as long as usual; 0 for one that has nothing to compare."""
    return [PaceNote(ratio * usual_s, usual_s if ratio else 0.0, span_s * max(1.0, *ratios)) for ratio in ratios]


def found_after(slowdowns: Slowdowns, notes: list[PaceNote], most: int = 1000) -> tuple[int, Change] | None:
    """Returns after how many such steps a change is found, and it."""
    for number in range(1, most + 1):
        change = slowdowns.add(notes)
        if change is not None:
            return number, change
    return None


def test_a_straggler_is_found_after_the_time() -> None:
    found = found_after(Slowdowns(3, HOLD_S), step(1.0, 2.3, 1.0))
    assert found is not None
    number, change = found
    assert HOLD_S <= number * 2.3 <= HOLD_S + 3 + 2.3
    assert (change.rank, change.factor) == (1, pytest.approx(2.3))
    assert change.ratios == pytest.approx((1.0, 2.3, 1.0))
    assert change.step_s == pytest.approx((0.8, 1.84, 0.8))
    assert change.duration_s == pytest.approx(number * 2.3)


def test_one_of_two_and_one_that_is_faster() -> None:
    for ratios, rank in (
        ((1.0, 2.1), 1),
        ((2.1, 1.0), 0),
        ((1.0, 0.45), 1),
        ((1.0, 1.0, 0.4, 1.0), 2),
        ((1.0, 40.0), 1),
    ):
        found = found_after(Slowdowns(len(ratios), HOLD_S), step(*ratios))
        assert found is not None and found[1].rank == rank, ratios


@pytest.mark.parametrize(
    "ratios",
    [(1.0, 1.9), (3.0, 3.0, 3.0), (2.0, 3.5), (1.0, 0.0), (0.0, 0.0), (1.0, 5.0)],
)
def test_what_is_no_change(ratios: tuple[float, ...]) -> None:
    """Too little, all together, too little beside that, nothing to compare with, nothing at all."""
    notes = step(*ratios)
    if ratios == (1.0, 5.0):  # one that computes a hundredth of the time holds nobody up
        notes = [notes[0], PaceNote(0.05 * STEP_S, 0.01 * STEP_S, STEP_S)]
    assert found_after(Slowdowns(len(ratios), HOLD_S), notes) is None


def test_a_single_slow_step_however_long() -> None:
    slowdowns = Slowdowns(2, HOLD_S)
    assert found_after(slowdowns, step(1.0, 1.0), 20) is None
    assert slowdowns.add(step(1.0, 500.0)) is None
    assert found_after(slowdowns, step(1.0, 1.0), 100) is None


def test_steps_that_are_longer_than_the_time() -> None:
    """One is not enough, nor two."""
    found = found_after(Slowdowns(2, HOLD_S), step(1.0, 3.0, usual_s=40.0, span_s=50.0))
    assert found is not None and found[0] == 3


def test_it_has_to_last() -> None:
    slowdowns = Slowdowns(2, HOLD_S)
    for _ in range(20):
        assert found_after(slowdowns, step(1.0, 3.0), 8) is None
        assert found_after(slowdowns, step(1.0, 1.0), 8) is None


def test_a_disturbed_step_counts_for_nothing() -> None:
    slowdowns = Slowdowns(2, HOLD_S)
    assert found_after(slowdowns, [PaceNote(1.0, 1.0, 1.0), PaceNote(0.0, -1.0, 3.0)]) is None
    assert slowdowns.elapsed_s == 0.0
    assert found_after(slowdowns, step(1.0, 3.0)) is not None


def test_it_waits_for_a_rank_that_had_something_to_say_but_not_for_ever() -> None:
    """Nothing is compared without it for as long as a change has to last."""
    slowdowns = Slowdowns(3, HOLD_S)
    assert found_after(slowdowns, step(1.0, 1.0, 1.0), 20) is None
    found = found_after(slowdowns, step(1.0, 3.0, 0.0))
    assert found is not None
    assert found[0] * 3.0 >= 1.2 * HOLD_S
    assert (found[1].rank, found[1].ratios[2]) == (1, 1.0)


def test_what_was_expected_is_what_counts_if_nothing_else_is_known() -> None:
    """The usual was seen when speeds had changed: rank 1 was expected to take three times as long."""
    found = found_after(Slowdowns(2, HOLD_S, expected_s=[0.8, 2.4]), step(1.0, 1.0))
    assert found is not None
    assert found[1].ratios == pytest.approx((1.0, 1 / 3))
    assert found[1].rank == 1


@pytest.mark.parametrize("expected_s", [[0.8, 1.2], [8.0, 8.0], [0.8, 0.0], []])
def test_what_was_expected_may_be_off(expected_s: list[float]) -> None:
    assert found_after(Slowdowns(2, HOLD_S, expected_s=expected_s), step(1.0, 1.0)) is None


def test_all_ranks_decide_alike_in_single_precision() -> None:
    """They are given what was sent, which is rounded: with equal inputs all find the same at the same step."""
    notes = [PaceNote(0.1 * 2.1, 0.1, 0.3), PaceNote(0.1, 0.1, 0.3), PaceNote(0.1 * 0.99, 0.1, 0.3)]
    found = [found_after(Slowdowns(3, 5.0), notes) for _ in range(2)]
    assert found[0] is not None and found[0] == found[1]

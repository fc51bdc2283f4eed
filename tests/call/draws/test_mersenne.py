"""States of torch's generator that are far ahead, and how far it has gone."""

from __future__ import annotations

import pytest
import torch

from farspan.call.draws import mersenne
from farspan.call.draws.mersenne import advanced, cached_normals, distance, is_same_state, position_of


def state_after(seed: int, count: int, *, has_cached: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if has_cached:
        torch.randn(1, generator=generator)
    torch.empty(count, dtype=torch.int32).random_(generator=generator)
    return generator.get_state()


@pytest.mark.parametrize("count", [20_561, 65_536, 624 * 500, 624 * 500 + 1, 624 * 500 - 1, 1_234_567])
@pytest.mark.parametrize("first", [0, 1, 397, 623, 624, 625])
def test_a_jump_goes_where_drawing_goes(count: int, first: int) -> None:
    before = state_after(count, first, has_cached=first == 397)
    generator = torch.Generator()
    generator.set_state(before)
    torch.empty(count, dtype=torch.int32).random_(generator=generator)
    wanted = generator.get_state()
    assert torch.equal(mersenne._jumped(before, count), wanted)
    assert torch.equal(advanced(before, count), wanted)
    assert distance(before, wanted, 1 << 40) == count


def test_nothing_drawn_is_the_same_state() -> None:
    state = state_after(3, 5)
    assert is_same_state(advanced(state, 0), state)
    assert distance(state, state, 10) == 0
    assert distance(state, state_after(4, 0), 1 << 20) is None


def test_a_far_jump_is_worth_it_the_second_time() -> None:
    state = state_after(5, 7)
    first, again = (advanced(state, 3_000_001) for _ in range(2))
    assert torch.equal(first, again)


def test_what_a_state_keeps() -> None:
    assert cached_normals(state_after(1, 0)) == 0
    assert cached_normals(state_after(1, 0, has_cached=True)) == 1
    assert position_of(state_after(1, 0)) == 624
    assert position_of(state_after(1, 1)) == 1
    assert position_of(state_after(1, 624)) == 624


@pytest.mark.parametrize("count", [1, 2, 623, 2 * mersenne._CHUNK - 1, 2 * mersenne._CHUNK, 2 * mersenne._CHUNK + 1])
def test_numbers_drawn_two_at_a_time_are_as_many(count: int) -> None:
    before = state_after(6, 1)
    generator = torch.Generator()
    generator.set_state(before)
    torch.empty(count, dtype=torch.int32).random_(generator=generator)
    assert torch.equal(advanced(before, count), generator.get_state())


@pytest.mark.parametrize("cached", range(4))
def test_what_neither_uses_nor_makes_normal_numbers_is_skipped_and_not_repeated(cached: int) -> None:
    """Another rank's dropout costs a jump, not the drawing of its mask."""
    before = mersenne.with_cached_normals(state_after(7, 3), cached)
    generator = torch.Generator()
    generator.set_state(before)
    torch.empty(100).bernoulli_(0.9, generator=generator)
    assert mersenne.keeps_the_same(before, generator.get_state())

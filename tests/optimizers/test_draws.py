"""What a step draws is what one process draws, and leaves the program's generator where that leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.ranks import differences

_PROGRAM = Path(__file__).with_name("drawing_program.py")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_step_may_draw(num_ranks: int) -> None:
    assert [found["draws"] for found in differences(str(_PROGRAM), "draws", num_ranks)] == [""] * num_ranks

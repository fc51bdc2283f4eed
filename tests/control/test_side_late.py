"""Who waits for whom, as far as ranks and the hub answer; nothing is sent."""

from __future__ import annotations

from typing import Any

import pytest

from farspan.control.late import LateRanks


def late(waits: dict[int, Any], world_size: int = 4) -> LateRanks:
    """As rank 3 asks: what each rank says that it waits for, a rank or what the hub is asked of."""

    def ask(question: dict[str, Any], patience_s: float) -> dict[str, Any]:
        if question["t"] == "stack":
            rank = question["to"]
            return {"stack": f"at line {rank}", "about": waits.get(rank)}
        return {"missing": question.get("key", [])}

    return LateRanks(3, world_size, ask)


@pytest.mark.parametrize(
    ("waits", "chain", "last"),
    [
        ({}, "", 1),
        ({1: {"rank": 0}}, ", which waits for rank 0", 0),
        ({1: {"key": [0]}}, ", which waits for rank 0", 0),
        ({1: {"key": [1, 3, 2]}, 2: {"rank": 0}}, ", which waits for rank 2, which waits for rank 0", 0),
        ({1: {"rank": 2}, 2: {"rank": 1}}, ", which waits for rank 2", 2),
        ({1: {"rank": 3}}, "", 1),
        ({1: {"rank": 4}}, "", 1),
        ({1: {"rank": -1}}, "", 1),
        ({1: {"key": ["0", None, 2]}}, ", which waits for rank 2", 2),
    ],
)
def test_who_does_not_go_on_is_found_behind_those_that_wait(waits: dict[int, Any], chain: str, last: int) -> None:
    found, why = late(waits).behind(1)
    assert found == chain
    assert why.startswith(f"rank {last} does not go on") and f"at line {last}" in why

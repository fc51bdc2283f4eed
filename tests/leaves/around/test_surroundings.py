"""Globals, closures, classes and files that modules read change between their calls: each sees what it would have."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.ranks import run_processes

PROGRAM = Path(__file__).with_name("surroundings.py")


@pytest.mark.parametrize("remat", [pytest.param("kept", marks=pytest.mark.slow), "again"])
def test_a_call_sees_what_was_around_it_when_it_was_made(remat: str) -> None:
    (plain,) = run_processes(1, PROGRAM, ["plainly"])
    assert plain.code == 0, plain.stderr
    first, second = run_processes(2, PROGRAM, [remat])
    assert first.code == second.code == 0, first.stderr + second.stderr
    for got, wanted in zip(first.stdout.splitlines(), plain.stdout.splitlines(), strict=True):
        assert got == wanted

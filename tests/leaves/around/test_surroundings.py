"""Globals, closures, classes and files that modules read change between their calls: each sees what it would have."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.ranks import run_processes

HERE = Path(__file__).parent


@pytest.mark.parametrize("remat", ["kept", "again"])
@pytest.mark.parametrize("program", ["surroundings.py", "far_surroundings.py"])
def test_a_call_sees_what_was_around_it_when_it_was_made(program: str, remat: str) -> None:
    steps = ["shorter"] if remat == "again" else []
    (plain,) = run_processes(1, HERE / program, ["plainly", *steps])
    assert plain.code == 0, plain.stderr
    first, second = run_processes(2, HERE / program, [remat, *steps])
    assert first.code == second.code == 0, first.stderr + second.stderr
    for got, wanted in zip(first.stdout.splitlines(), plain.stdout.splitlines(), strict=True):
        assert got == wanted

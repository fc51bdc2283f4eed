"""Activations computed again, over real processes, together with what models are trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.programs import remat as programs
from tests.support.ranks import run_processes


def _trained(*remats: str) -> list[list[dict[str, Any]]]:
    """What each training gave on each rank."""
    finished = run_processes(2, Path(programs.__file__), remats, timeout_s=240.0)
    assert [process.stderr for process in finished if process.code] == []
    return [list(map(json.loads, process.stdout.splitlines()[-len(remats) :])) for process in finished]


@pytest.mark.timeout(500)  # each of the trainings compiles
def test_it_goes_with_what_else_there_is() -> None:
    without = _trained("null", "false")
    for rank, (found,) in enumerate(_trained('["*.*"]')):
        plainly, kept = without[rank]
        wanted = {**plainly, "dropout": kept["dropout"]}
        assert [name for name in programs.MODELS if found[name] != wanted[name]] == [], f"rank {rank}"

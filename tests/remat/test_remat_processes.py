"""Activations computed again, over real processes, together with what models are trained with."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from tests.programs import remat as programs
from tests.support.ranks import run_processes

NUM_PROCESSES = 2


@functools.cache
def trained(remat: str, num_processes: int = NUM_PROCESSES) -> list[dict[str, Any]]:
    """What each training gave on each rank."""
    finished = run_processes(num_processes, Path(programs.__file__), [remat], timeout_s=240.0)
    assert [process.stderr for process in finished if process.code] == []
    return [json.loads(process.stdout.splitlines()[-1]) for process in finished]


@pytest.mark.timeout(300)  # each of the runs compiles
@pytest.mark.parametrize("remat", ['["*.*"]'])
def test_it_goes_with_what_else_there_is(remat: str) -> None:
    plainly, kept = trained("null", 1), trained("false")
    for rank, found in enumerate(trained(remat)):
        wanted = {**plainly[0], "dropout": kept[rank]["dropout"]}
        assert [name for name in programs.MODELS if found[name] != wanted[name]] == [], f"rank {rank}"

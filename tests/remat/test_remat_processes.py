"""Activations computed again, over real processes, together with what models are trained with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.programs import remat as programs
from tests.support.ranks import run_processes


@pytest.mark.timeout(300)  # each of the trainings compiles
def test_it_goes_with_what_else_there_is() -> None:
    for rank, process in enumerate(
        run_processes(2, Path(programs.__file__), ["null", "false", '["*.*"]'], timeout_s=240)
    ):
        assert process.code == 0, process.stderr
        plainly, kept, found = map(json.loads, process.stdout.splitlines()[-3:])
        wanted = {**plainly, "dropout": kept["dropout"]}
        assert [name for name in programs.MODELS if found[name] != wanted[name]] == [], f"rank {rank}"

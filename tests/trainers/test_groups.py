"""Trainers under `data_parallel=2`: each group trains on its half of the data, and evaluates on all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.ranks import run_processes

for package in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(package)
pytestmark = pytest.mark.timeout(300)

PROGRAM = Path(__file__).parent / "programs" / "in_groups.py"


@pytest.mark.parametrize("trainer", ["transformers", "accelerate", "lightning"])
def test_each_group_trains_on_its_share_and_evaluates_on_everything(trainer: str, tmp_path: Path) -> None:
    finished = run_processes(
        2,
        PROGRAM,
        [trainer, str(tmp_path), "--farspan"],
        timeout_s=280.0,
        environment={"HF_HUB_OFFLINE": "1", "FARSPAN_FILES": "all"},
    )
    assert [process.stderr[-3000:] for process in finished if process.code] == []
    one, two = [json.loads((tmp_path / "all" / f"groups{rank}.json").read_text()) for rank in range(2)]
    assert sorted([*one["rows"]["train"], *two["rows"]["train"]]) == list(range(32))
    assert len(one["rows"]["train"]) == len(two["rows"]["train"])
    assert one["rows"]["evaluate"] == two["rows"]["evaluate"] == list(range(12))
    assert one["weights"] == two["weights"]
    assert not any("same batches" in process.stderr for process in finished)

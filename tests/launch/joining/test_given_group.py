"""A process group that the program, or a trainer, has set up before: it says who is who, whatever the variables say."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_processes

_PROGRAM = """
import os
import torch.distributed as dist
from torch import nn
import farspan

dist.init_process_group("gloo")
os.environ["WORLD_SIZE"] = "1"  # of which only the variables say so
os.environ["LOCAL_WORLD_SIZE"] = "1"  # accelerate says so of several processes where the launcher was silent
farspan.distribute(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
print(farspan.execute.process.world.current_engine().num_ranks)
"""


def test_a_group_that_is_there_counts_and_not_the_variables(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(_PROGRAM)
    finished = run_processes(2, script)
    assert [process.stderr for process in finished if process.code] == []
    assert [process.stdout.strip() for process in finished] == ["2", "2"]

"""benchmarks/record_overhead: ranks whose peers do not exist record, and make programs, as a benchmark needs it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.ranks import run_processes

PROGRAM = """
import json
from benchmarks.record_overhead.run import World
world = World(1, 4, 4)
print(json.dumps([len(world.record(3)), len(world.build(2))]))
"""


def test_a_rank_records_and_makes_programs_without_its_peers(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(PROGRAM)
    (done,) = run_processes(1, program)
    assert done.code == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [3, 2]

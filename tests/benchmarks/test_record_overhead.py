"""benchmarks/record_overhead: ranks whose peers do not exist record, and make programs, as a benchmark needs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json
from benchmarks.record_overhead.run import World
world = World(1, 4, 4)
print(json.dumps([len(world.record(3)), len(world.build(2))]))
"""


def test_a_rank_records_and_makes_programs_without_its_peers() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [3, 2]

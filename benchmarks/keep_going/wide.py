"""Runs that lose members of wide stages, of which the others go on with the copies that they keep."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.keep_going.runs import LONGEST_S, start, variables

__all__ = ["trial"]

PLANS: list[tuple[int, dict[str, str], list[int]]] = [
    (3, {"*": "rank:0+rank:1+rank:2"}, [0, 1, 2]),
    (3, {"[0-6]*": "rank:0+rank:1", "[7-9]*": "rank:2", "1[0-2]*": "rank:2"}, [0, 1]),
]
"""Number of ranks, plan, and the ranks of which one may be lost at a time, as long as two are left."""
LAST_STEP = 120
"""No kill comes later: steps are to follow."""
_TRAIN = Path(__file__).parent / "train_wide.py"


def trial(folder: Path, kind: int, num_kills: int, chance: random.Random) -> list[dict[str, Any]]:
    """One run; a row for each kill.

    Args:
        folder: Of the run.
        kind: Number of the plan.
        num_kills: At most so many.
        chance: Of the victims and moments.
    """
    num_ranks, plan, members = PLANS[kind % len(PLANS)]
    run = start(folder, num_ranks, str(_TRAIN), "farspan", str(folder), "{pipe}", json.dumps(plan))
    alive, rows = list(members), list[dict[str, Any]]()
    while len(alive) > 1 and len(rows) < num_kills:
        seen = len(run.steps)
        if not run.listen_until(lambda seen=seen: len(run.steps) >= seen + 12, LONGEST_S):
            break
        run.listen_until(lambda: False, chance.uniform(0.0, 1.0))
        if run.process.poll() is not None or max(step for _, step, _, _ in run.steps) > LAST_STEP:
            break
        victim = alive.pop(chance.randrange(len(alive)))
        num_left = num_ranks - len(rows) - 1
        rows.append({"plan": plan, "left": num_left, "rank": victim, "killed": time.monotonic()})
        os.kill(run.pids[victim], signal.SIGKILL)
    run.listen_until(lambda: run.process.poll() is not None, LONGEST_S)
    for row in rows:
        later = [at for _, _, world, at in run.steps if at > row["killed"] and world <= row["left"]]
        row["time_s"] = min(later) - row.pop("killed") if later else None
    if run.process.poll() is None:
        run.process.send_signal(signal.SIGTERM)
    code = run.process.wait(60)
    os.close(run.pipe)
    is_same = code == 0 and _is_same(folder, num_ranks, [row["rank"] for row in rows])
    return [{**row, "code": code, "same": is_same} for row in rows]


def _is_same(folder: Path, num_ranks: int, lost: list[int]) -> bool:
    """Whether every rank that is left has what the program finds in one process."""
    subprocess.run([sys.executable, str(_TRAIN), "plain", str(folder)], env=variables(), check=True, timeout=LONGEST_S)
    expected = json.loads((folder / "plain.json").read_text())
    left = [rank for rank in range(num_ranks) if rank not in lost]
    return all(json.loads((folder / f"found{rank}.json").read_text()) == expected for rank in left)

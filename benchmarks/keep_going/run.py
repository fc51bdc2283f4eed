"""Whether the ranks that are left go on when others are killed, how long that takes, and with which numbers.

    2 groups of 2 ranks    one kill in a run
    4 groups of 1 rank     three kills in a run, of which some come while the others recover from the one before
    wide stages, 3 ranks   one or two kills in a run: members of one stage of three, of one of two in front of another

A kill (SIGKILL) of a random rank comes at a random moment after a step. Its time is that until the next step that
a rank which is left ends without the lost ones.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402
from benchmarks.keep_going import wide  # noqa: E402
from benchmarks.keep_going.runs import LONGEST_S, start, variables  # noqa: E402

NUM_RANKS = 4
BAR_S = 5.0
LAST_STEP = 110
"""No kill comes later: steps are to follow."""
TRAIN = Path(__file__).parent / "train.py"


def trial(folder: Path, num_groups: int, num_kills: int, chance: random.Random) -> list[dict[str, Any]]:
    """One run; a row for each kill."""
    run = start(folder, NUM_RANKS, str(TRAIN), "groups", str(folder), "{pipe}", str(num_groups))
    size = NUM_RANKS // num_groups
    alive = list(range(num_groups))
    gone: list[int] = []
    rows: list[dict[str, Any]] = []
    for _ in range(num_kills):
        is_soon = bool(rows) and chance.random() < 0.4
        seen = len(run.steps)
        if not is_soon and not run.listen_until(lambda seen=seen: len(run.steps) >= seen + 12, LONGEST_S):
            break
        run.listen_until(lambda: False, chance.uniform(0.0, 0.2 if is_soon else 0.6))
        if run.process.poll() is not None or max(step for _, step, _, _ in run.steps) > LAST_STEP:
            break
        group = chance.choice(alive)
        victim = group * size + chance.randrange(size)
        killed = time.monotonic()
        os.kill(run.pids[victim], signal.SIGKILL)
        alive.remove(group)
        gone.append(group)
        last = max((at for _, _, _, at in run.steps), default=killed)
        rows.append(
            {"groups": num_groups, "left": len(alive), "rank": victim, "soon": is_soon, "killed": killed, "last": last}
        )
    run.listen_until(lambda: run.process.poll() is not None, LONGEST_S)
    for row in rows:
        later = [at for _, _, world, at in run.steps if at > row["killed"] and world <= row["left"]]
        row["time_s"] = min(later) - row["killed"] if later else None
        del row["killed"], row["last"]
    if run.process.poll() is None:
        run.process.send_signal(signal.SIGTERM)
    code = run.process.wait(60)
    os.close(run.pipe)
    is_same = code == 0 and compare(folder, num_groups, alive, gone)
    return [{**row, "code": code, "same": is_same} for row in rows]


def compare(folder: Path, num_groups: int, alive: list[int], gone: list[int]) -> bool:
    """Whether all groups that are left have the losses and the state of gloo's run in which the others leave."""
    found = {group: json.loads((folder / f"group{group}.json").read_text()) for group in alive}
    numbers = found[alive[0]]["means"]
    if any(each["means"] != numbers for each in found.values()):
        return False
    means = [sorted(set(range(num_groups)) - set(gone[: num_groups - number])) for number in numbers]
    (folder / "means.json").write_text(json.dumps(means))
    command = [sys.executable, str(TRAIN), "reference", str(folder), "-", str(num_groups)]
    ranks = [subprocess.Popen(command, env=variables() | {"RANK": str(rank)}) for rank in range(num_groups)]
    codes = [rank.wait(LONGEST_S) for rank in ranks]
    if any(codes):
        return False
    same = True
    for group in alive:
        expected = json.loads((folder / f"reference{group}.json").read_text())
        same &= all(found[group][key] == expected[key] for key in ("losses", "state"))
    return same


def of_groups(kills: int, chance: random.Random) -> list[dict[str, Any]]:
    """Runs with groups, until there have been so many kills."""
    rows: list[dict[str, Any]] = []
    number = 0
    while len(rows) < kills:
        num_groups = 2 if number % 2 == 0 else 4
        most = min(num_groups - 1, kills - len(rows))
        rows += watched(lambda folder, most=most, n=num_groups: trial(folder, n, most, chance))
        number += 1
    return rows


def of_wide_stages(kills: int, chance: random.Random) -> list[dict[str, Any]]:
    """Runs with wide stages, until there have been so many kills."""
    rows: list[dict[str, Any]] = []
    number = 0
    while len(rows) < kills:
        most = kills - len(rows)
        rows += watched(lambda folder, most=most, n=number: wide.trial(folder, n, most, chance))
        number += 1
    return rows


def watched(trial: Callable[[Path], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of a trial, which are shown."""
    folder = Path(tempfile.mkdtemp())
    try:
        found = trial(folder)
        print(*found, sep="\n", file=sys.stderr)
        if any(not row["same"] for row in found):
            print((folder / "output").read_text()[-4000:], file=sys.stderr)
        return found or [{"time_s": None, "same": False, "why": "no kill"}]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def summary(what: str, rows: list[dict[str, Any]]) -> str:
    times = [row["time_s"] for row in rows if row["time_s"] is not None]
    nobody = [float("nan")]
    return (
        f"{what}: {len(times)} of {len(rows)} kills recovered, {sum(row['same'] for row in rows)} in runs with equal "
        f"losses and state bit for bit; from a kill to the next step median {statistics.median(times or nobody):.2f} "
        f"s, worst {max(times or nobody):.2f} s"
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of all runs of each kind together")
    parser.add_argument("--kind", choices=["groups", "wide"], help="only this kind")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    num_kills = 2 if args.quick else args.kills
    rows: list[dict[str, Any]] = []
    figures: list[str] = []
    for kind, what, runs in (("groups", "groups", of_groups), ("wide", "wide stages", of_wide_stages)):
        if args.kind in (None, kind):
            found = runs(num_kills, random.Random(args.seed))
            rows += [{"kind": kind, **row} for row in found]
            figures.append(summary(what, found))
    holds = all(row["same"] and row["time_s"] is not None and row["time_s"] <= BAR_S for row in rows)
    finish(args, rows=rows, figure="; ".join(figures), holds=holds)


if __name__ == "__main__":
    main()

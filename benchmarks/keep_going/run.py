"""Whether groups of ranks go on when others are killed, how long that takes, and with which numbers.

    2 groups of 2 ranks    one kill in a run
    4 groups of 1 rank     three kills in a run, of which some come while the others recover from the one before

A kill (SIGKILL) of a random rank comes at a random moment after a step. Its time is that until the next step that
a rank which is left ends without the lost group.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402

NUM_RANKS = 4
BAR_S = 5.0
LONGEST_S = 300.0
LAST_STEP = 110
"""No kill comes later: steps are to follow."""
TRAIN = Path(__file__).parent / "train.py"


@dataclass(kw_only=True)
class Run:
    """A launcher, and what its ranks have said."""

    process: subprocess.Popen[bytes]
    pipe: int
    pids: dict[int, int] = field(default_factory=dict)
    steps: list[tuple[int, int, int, float]] = field(default_factory=list)
    """Rank, step, number of groups, time."""
    rest: bytes = b""

    def listen(self, limit_s: float) -> bool:
        """Take what the ranks say, or return after that time; False then, or when the launcher has ended."""
        pidfd = os.pidfd_open(self.process.pid)
        try:
            ready = select.select([self.pipe, pidfd], [], [], max(0.0, limit_s))[0]
        finally:
            os.close(pidfd)
        if self.pipe not in ready:
            return False
        *lines, self.rest = (self.rest + os.read(self.pipe, 1 << 16)).split(b"\n")
        for line in lines:
            kind, *words = line.decode().split()
            if kind == "pid":
                self.pids[int(words[0])] = int(words[1])
            else:
                self.steps.append((int(words[0]), int(words[1]), int(words[2]), float(words[3])))
        return True

    def listen_until(self, condition: Any, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not condition():
            if not self.listen(end - time.monotonic()) and (time.monotonic() >= end or self.process.poll() is not None):
                return bool(condition())
        return True


def variables() -> dict[str, str]:
    found = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    found.pop("FARSPAN_RECORD", None)
    return found


def start(folder: Path, num_groups: int) -> Run:
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "farspan", "run", "-n", str(NUM_RANKS), "--keep-going", "--files", "all"]
    command += ["--log-dir", str(folder / "logs"), str(TRAIN), "groups", str(folder), str(pipe), str(num_groups)]
    opened = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, env=variables(), stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    return Run(process=process, pipe=opened)


def trial(folder: Path, num_groups: int, num_kills: int, chance: random.Random) -> list[dict[str, Any]]:
    """One run; a row for each kill."""
    run, size = start(folder, num_groups), NUM_RANKS // num_groups
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


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of all runs together")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    num_kills = 2 if args.quick else args.kills
    chance = random.Random(args.seed)
    rows: list[dict[str, Any]] = []
    number = 0
    while len(rows) < num_kills:
        num_groups = 2 if number % 2 == 0 else 4
        folder = Path(tempfile.mkdtemp())
        try:
            found = trial(folder, num_groups, min(num_groups - 1, num_kills - len(rows)), chance)
            print(*found, sep="\n", file=sys.stderr)
            if any(not row["same"] for row in found):
                print((folder / "output").read_text()[-4000:], file=sys.stderr)
            rows += found or [{"groups": num_groups, "time_s": None, "same": False, "why": "no kill"}]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        number += 1
    times = sorted(row["time_s"] for row in rows if row["time_s"] is not None)
    num_same = sum(row["same"] for row in rows)
    nobody = [float("nan")]
    figure = (
        f"{len(times)} of {len(rows)} kills recovered, {num_same} in runs with the losses and state of gloo's run bit "
        f"for bit; from a kill to the next step median {statistics.median(times or nobody):.2f} s, worst "
        f"{max(times or nobody):.2f} s"
    )
    finish(args, rows=rows, figure=figure, holds=len(times) == num_same == len(rows) and max(times) <= BAR_S)


if __name__ == "__main__":
    main()

"""Whether a run of 4 processes recovers from SIGKILL of any rank at any moment, how long that takes, and the numbers.

    disk       `farspan run -n 4 --max-restarts N`: the program of exact_resume, which saves in each step
    memory     the same, and it saves into memory
    standby    the same, with `--standby`: the processes of the next start have loaded torch
    torchrun   `torchrun --nproc-per-node 4 --max-restarts N`: the same model, by DDP and DCP

A kill comes at a random moment after a start's first step, or (one of four) after its processes have begun. The time of
a kill is that until the next step is done.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402
from benchmarks.recovery.words import Heard  # noqa: E402

LAYERS = ("disk", "memory", "standby")
NUM_RANKS = 4
PAUSE_S = 0.1
"""Of each step, so that a start takes ten before it is killed, at most."""
HERE = Path(__file__).parent
LONGEST_S = 120.0
"""A start that takes no step for as long has not recovered."""


@dataclass(kw_only=True)
class Run(Heard):
    """A launcher, and what its ranks have said."""

    pids: dict[int, dict[int, int]] = field(default_factory=dict)
    """By the number of the start, and rank."""
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    """Number of the start, step, time."""
    begun: dict[int, float] = field(default_factory=dict)
    """By the number of the start, when the first of its processes has run the script."""

    def take(self, kind: str, words: list[str]) -> None:
        if kind == "pid":
            self.pids.setdefault(int(words[0]), {})[int(words[1])] = int(words[2])
            self.begun.setdefault(int(words[0]), time.monotonic())
        else:
            self.steps.append((int(words[0]), int(words[1]), float(words[2])))


def start(kind: str, folder: Path, steps: int, num_kills: int) -> Run:
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    words = [str(folder), str(pipe), str(steps), str(PAUSE_S if kind != "plain" else 0.0)]
    if kind == "plain":
        command = [sys.executable, str(HERE / "train.py"), *words]
    elif kind in LAYERS:
        command = [sys.executable, "-m", "farspan", "run", "-n", str(NUM_RANKS), "--max-restarts", str(num_kills)]
        command += ["--standby"] if kind == "standby" else []
        command += ["--files", "all", "--log-dir", str(folder / "logs"), str(HERE / "train.py"), *words]
        command += ["memory"] if kind != "disk" else []
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS), "--standalone"]
        command += ["--max-restarts", str(3 * num_kills), str(HERE / "train_dcp.py"), *words]
    variables = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    variables.pop("FARSPAN_RECORD", None)
    opened = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    return Run(process=process, pipe=opened)


def trial(
    kind: str, folder: Path, steps: int, num_kills: int, chance: random.Random, after_s: float
) -> list[dict[str, Any]]:
    """Let a run go on until it has been killed that often, and to its end; a row for each kill."""
    run = start(kind, folder, steps, num_kills)
    rows: list[dict[str, Any]] = []
    seen = -1
    while len(rows) < num_kills:
        before = seen
        in_start = chance.random() < 0.25

        def has_begun(before: int = before, in_start: bool = in_start) -> bool:
            newest = max(run.pids, default=-1)
            if newest <= before or len(run.pids[newest]) < NUM_RANKS:
                return False
            return in_start or any(number == newest for number, _, _ in run.steps)

        if not run.listen_until(has_begun, LONGEST_S):
            break
        seen = max(run.pids)
        run.listen_until(lambda: False, chance.uniform(0.0, 1.0) + (0.0 if in_start else after_s))
        if max(run.pids) != seen or run.process.poll() is not None:  # torchrun's own failures start again too
            continue
        victim = chance.randrange(NUM_RANKS)
        killed = time.monotonic()
        os.kill(run.pids[seen][victim], signal.SIGKILL)
        rows.append({"kind": kind, "start": seen, "rank": victim, "before a step": in_start, "killed": killed})

    run.listen_until(lambda: False, 10 * LONGEST_S if len(rows) == num_kills else 1.0)
    for row in rows:
        later = [at for number, _, at in run.steps if number > row["start"] and at > row["killed"]]
        begun = [at for number, at in run.begun.items() if number > row["start"] and at > row["killed"]]
        row["begun_s"] = min(begun) - row["killed"] if begun else None
        row["time_s"] = min(later) - row["killed"] if later else None
        del row["killed"]
    if run.process.poll() is None:
        run.process.send_signal(signal.SIGTERM)
    code = run.process.wait(60)
    os.close(run.pipe)
    missed = [{"kind": kind, "time_s": None, "why": "no further start"}] * (num_kills - len(rows))
    return [{**row, "code": code} for row in [*rows, *missed]]


def describe(rows: list[dict[str, Any]], kind: str) -> str:
    """How many kills a step followed, and after which time."""
    times = [row["time_s"] for row in rows if row["kind"] == kind]
    found = [each for each in times if each is not None] or [float("nan")]
    recovered = f"{kind} {len(times) - times.count(None)} of {len(times)} recovered"
    return f"{recovered}, median {statistics.median(found):.1f} s, worst {max(found):.1f} s"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each side")
    parser.add_argument(
        "--layer", choices=("all", *LAYERS), default="all", help="where farspan saves; all: torchrun too"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--after", type=float, default=0.0, metavar="S", help="seconds from a first step to a kill")
    args = parser.parse_args()
    num_kills = 2 if args.quick else args.kills
    steps = int((1.5 + args.after) * num_kills / PAUSE_S)
    kinds = (*LAYERS, "torchrun") if args.layer == "all" else (args.layer,)
    top = Path(tempfile.mkdtemp())
    rows: list[dict[str, Any]] = []
    are_same: list[bool] = []
    try:
        for kind in ("plain", *kinds):
            (top / kind).mkdir()
        plain = start("plain", top / "plain", steps, 0)
        plain.listen_until(lambda: False, 600.0)
        assert plain.process.wait(60) == 0, (top / "plain" / "output").read_text()
        expected = json.loads((top / "plain" / "result.json").read_text())
        for kind in kinds:
            rows += trial(kind, top / kind, steps, num_kills, random.Random(args.seed), args.after)
            print((top / kind / "output").read_text()[-1500:], file=sys.stderr)
            if kind in LAYERS:
                result = top / kind / "result.json"
                are_same.append(result.exists() and json.loads(result.read_text()) == expected)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    figure = "; ".join(describe(rows, kind) for kind in kinds)
    figure += f"; {steps} losses and the final state {'equal' if all(are_same) else 'DIFFERENT'}"
    ours = [row for row in rows if row["kind"] in LAYERS]
    finish(args, rows=rows, figure=figure, holds=all(are_same) and all(row["time_s"] is not None for row in ours))


if __name__ == "__main__":
    main()

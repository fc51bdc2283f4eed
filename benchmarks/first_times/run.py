"""First times: the first loss of a script, the first micro-batch of each length, the first text.

start     from the start of a script to its first loss: plainly, over two ranks with a cache that is empty, and over
          two ranks once more. The demo is examples/train_gpt.py.
lengths   a loop of 200 micro-batches of which no two have the same length, from its first line to its last
texts     100 tokens, each longer by one than what came before
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import arguments, finish  # noqa: E402
from programs import LENGTHS, STARTS, TEXTS  # noqa: E402

DEADLINE_S = 300.0
PROGRAMS = Path(__file__).with_name("programs.py")
DEMO = ["train_gpt.py", "--steps", "2", "--stop-after", "2", "--print-every", "1", "--sample-bytes", "0"]
DEMO += ["--threads", "1"]
BARS = {"first": (1.15, 0.5), "again": (1.1, 0.2), "lengths": (1.5, 1.0), "texts": (2.0, 0.5)}
"""At most so many times the plain program, and so many seconds."""


def run(name: str, *, is_plain: bool, cache: Path) -> dict[str, float]:
    """Returns seconds: "start", from the process's start to its first loss; "end", the loop's."""
    script = [str(ROOT / "examples" / "train_gpt_plain.py" if is_plain else ROOT / "examples" / DEMO[0]), *DEMO[1:]]
    script = script if name == "demo" else [str(PROGRAMS), name]
    command = [sys.executable, *([] if is_plain else ["-m", "farspan", "run", "-n", "2"]), *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"}
    environment |= {} if is_plain else {"FIRST_TIMES": "farspan"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    began, found, lines = time.perf_counter(), dict[str, float](), list[str]()
    with subprocess.Popen(
        ["timeout", str(DEADLINE_S), *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("first ") or (name == "demo" and "loss" in line and "start" not in found):
                found["start"] = time.perf_counter() - began
            elif line.startswith("end "):
                found["end"] = float(line.split()[1])
    if process.returncode or "start" not in found:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(lines)}")
    return found


def row(part: str, name: str, plain: list[float], ours: list[float]) -> dict[str, Any]:
    """Compares medians of runs that took turns."""
    times, seconds = BARS[part]
    plain_s, ours_s = median(plain), median(ours)
    holds = ours_s <= times * plain_s + seconds
    print(
        f"{part:8} {name:32} plain {plain_s:6.2f} s  farspan {ours_s:6.2f} s  ({ours_s / plain_s:5.2f} x;"
        f" bar {times} x + {seconds} s: {'holds' if holds else 'does not hold'})",
        flush=True,
    )
    return {"part": part, "name": name, "plain_s": plain_s, "farspan_s": ours_s, "holds": holds}


def starts(name: str, num_turns: int) -> list[dict[str, Any]]:
    plain, first, again = list[float](), list[float](), list[float]()
    for _ in range(num_turns):
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder)
            plain.append(run(name, is_plain=True, cache=cache)["start"])
            shutil.rmtree(cache / "farspan", ignore_errors=True)
            first.append(run(name, is_plain=False, cache=cache)["start"])
            again.append(run(name, is_plain=False, cache=cache)["start"])
    return [row("first", name, plain, first), row("again", name, plain, again)]


def loops(part: str, name: str, num_turns: int) -> dict[str, Any]:
    plain, ours = list[float](), list[float]()
    for _ in range(num_turns):
        with tempfile.TemporaryDirectory() as folder:
            plain.append(run(name, is_plain=True, cache=Path(folder))["end"])
            ours.append(run(name, is_plain=False, cache=Path(folder))["end"])
    return row(part, name, plain, ours)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", metavar="NAME", help="one program")
    args = parser.parse_args()
    turns = 1 if args.quick else args.turns
    rows: list[dict[str, Any]] = []
    for name in ["demo", *STARTS]:
        if args.only in (None, name):
            rows += starts(name, turns)
    for part, programs in (("lengths", LENGTHS), ("texts", TEXTS)):
        for name in programs:
            if args.only in (None, name):
                rows.append(loops(part, name, turns))
    num_held = sum(each["holds"] for each in rows)
    finish(args, rows=rows, figure=f"{num_held} of {len(rows)} rows hold", holds=num_held == len(rows))


if __name__ == "__main__":
    main()

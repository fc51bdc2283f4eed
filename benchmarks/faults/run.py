"""Faults at random moments: each is found, named, ended and cleaned up after, under farspan run and torchrun.

A small training over 2 to 4 ranks meets one fault: a rank is killed, raises, leaves, stops, does something else, or
only something around it breaks. What must come of each kind stands in `kinds.py`.
"""

from __future__ import annotations

import concurrent.futures
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402
from benchmarks.faults.job import plain_lines, run_case  # noqa: E402
from benchmarks.faults.judge import QUESTIONS, judge  # noqa: E402
from benchmarks.faults.kinds import KINDS, LAUNCHERS, Case, schedule  # noqa: E402

NUM_RUNS = 200
QUICK = ("none", "kill", "loop", "exit_3")
NUM_STEPS = 40
"""Of a training that no fault ends."""


def run_one(number: int, case: Case, base: Path, plain: list[str]) -> dict[str, Any]:
    """One row of the table; its folder stays where the verdict is not good."""
    folder = base / f"{number:03d}"
    began = time.monotonic()
    outcome = run_case(case, folder, base / "cache")
    verdict = judge(case, outcome, plain)
    if verdict.is_good:
        shutil.rmtree(folder)
    return {
        **asdict(case),
        **{question: verdict.holds(question) for question in QUESTIONS},
        "problems": verdict.problems,
        "ended_s": round(outcome.duration_s, 2) if outcome.struck else None,
        "run_s": round(time.monotonic() - began, 2),
        "folder": "" if verdict.is_good else str(folder),
    }


def show(row: dict[str, Any]) -> None:
    """A line for a run, and for one that is not good what it takes to see it again."""
    verdict = " ".join(question if row[question] else f"NOT-{question.upper()}" for question in QUESTIONS)
    ended = "" if row["ended_s"] is None else f"{row['ended_s']:5.1f} s"
    print(f"{row['kind']:<16s}{row['launcher']:<10s}{row['num_ranks']} ranks  {ended:<9s}{verdict}", flush=True)
    if row["folder"]:
        for question, problems in row["problems"].items():
            for problem in problems:
                print(f"    {question}: {problem}")
        again = f"--only {row['kind']} --launcher {row['launcher']} --runs 1 --seed {row['seed']}"
        print(f"    again: {again}    output: {row['folder']}", flush=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=NUM_RUNS, metavar="N", help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each has the next one")
    parser.add_argument("--only", action="append", choices=list(KINDS), metavar="KIND", help="faults of this kind")
    parser.add_argument("--launcher", action="append", choices=LAUNCHERS, help="only under this one")
    parser.add_argument("--at-a-time", type=int, default=2, metavar="N", help="runs at one time")
    parser.add_argument("--list", action="store_true", help="print the kinds and end")
    args = parser.parse_args()
    if args.list:
        for name, kind in KINDS.items():
            print(f"{name:<16s}{', '.join(kind.launchers):<16s}{kind.what}")
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background: its Ctrl-C must reach launchers
        signal.signal(signal.SIGINT, signal.default_int_handler)
    names = args.only or list(QUICK if args.quick else KINDS)
    cases = schedule(8 if args.quick else args.runs, args.seed, names, args.launcher or list(LAUNCHERS))
    base = Path(tempfile.mkdtemp(prefix="faults-"))
    plain = plain_lines(base, NUM_STEPS)
    rows: list[dict[str, Any]] = []
    with concurrent.futures.ThreadPoolExecutor(args.at_a_time) as pool:
        running = [pool.submit(run_one, number, case, base, plain) for number, case in enumerate(cases)]
        for done in concurrent.futures.as_completed(running):
            rows.append(done.result())
            show(rows[-1])
    if all(not row["folder"] for row in rows):
        shutil.rmtree(base)
    print_table(rows)
    parts = [f"{question} {100 * sum(row[question] for row in rows) / len(rows):.1f} %" for question in QUESTIONS]
    num_left = sum(not row["clean"] for row in rows)
    figure = f"of {len(rows)} runs with faults: {', '.join(parts)} ({num_left} left something behind)"
    finish(args, rows=rows, figure=figure, holds=all(row[question] for row in rows for question in QUESTIONS))


def print_table(rows: list[dict[str, Any]]) -> None:
    """For each kind and launcher: how many runs, for how many of them each answer is yes, and the longest end."""
    print(f"\n{'kind':<16s}{'launcher':<10s}{'runs':<6s}" + "".join(f"{name:<7s}" for name in QUESTIONS) + "longest")
    for name in KINDS:
        for launcher in LAUNCHERS:
            chosen = [row for row in rows if (row["kind"], row["launcher"]) == (name, launcher)]
            if not chosen:
                continue
            counts = "".join(f"{sum(row[question] for row in chosen):<7d}" for question in QUESTIONS)
            longest = max(row["ended_s"] or 0.0 for row in chosen)
            print(f"{name:<16s}{launcher:<10s}{len(chosen):<6d}{counts}{longest:.1f} s")


if __name__ == "__main__":
    main()

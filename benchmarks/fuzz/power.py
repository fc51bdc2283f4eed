"""Measures how many of the faults of `faults.py` drawn programs notice, and which program does first.

    python benchmarks/fuzz/power.py --out power.jsonl --most-s 3600      goes on where it stopped
    python benchmarks/fuzz/power.py --out power.jsonl --confirm          each finding again, in a copy of the source

A program is run without a fault, and with each that has not been found and that it comes to (`switched.py`). A fault is
found where a program without a finding has one with it. A row of `--out` is a program.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "src")) if path not in sys.path]

from benchmarks.fuzz.faults import FAULTS  # noqa: E402
from benchmarks.fuzz.switched import FINDINGS, faulted_text, serve  # noqa: E402

TASK_S = 900.0
RECYCLED_AFTER = 40


class Power:
    """What has been found, with one grammar."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began = time.monotonic()
        lines = args.out.read_text().splitlines() if args.out.exists() else []
        self.rows = [row for row in map(json.loads, lines) if row["grammar"] == args.grammar]
        self.lock = threading.Lock()
        only = {fault.name for fault in FAULTS if args.only is None or fault.name in args.only}
        self.wanted = sorted(only - {name for row in self.rows for name in row["found"]})
        done = {row["number"] for row in self.rows}
        self.numbers = iter([number for number in range(args.begin, args.programs) if number not in done])

    def work(self, folder: str) -> None:
        """Runs programs in a process, and in its successors."""
        context = multiprocessing.get_context("spawn")
        process, count = None, 0
        connection: Any = None
        while self.wanted and (not self.args.most_s or time.monotonic() - self.began < self.args.most_s):
            with self.lock:
                number, wanted = next(self.numbers, None), [*self.wanted]
            if number is None:
                break
            if process is None:
                connection, other = context.Pipe()
                process, count = context.Process(target=serve, args=(other, folder)), 0
                process.start()
                other.close()
            began, count = time.monotonic(), count + 1
            connection.send((self.args.seed, number, wanted, number < self.args.first))
            try:
                answer = connection.recv() if connection.poll(TASK_S) else None
            except EOFError:
                answer = None
            if answer is not None:
                self.add({"number": number, **answer}, time.monotonic() - began)
            else:
                print(f"{number:5d}  no answer", flush=True)
            if answer is None or answer["is_over"] or count == RECYCLED_AFTER:
                process.kill()
                process.join()
                process = None
        if process is not None:
            process.kill()
            process.join()

    def add(self, row: dict[str, Any], seconds: float) -> None:
        row |= {"seconds": round(seconds, 1), "load": round(os.getloadavg()[0], 1), "grammar": self.args.grammar}
        with self.lock:
            self.rows.append(row)
            self.wanted = [name for name in self.wanted if name not in row["found"]]
            with self.args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        bad = [kind for kind, _ in row["clean"] if kind in FINDINGS]
        if row["clean"]:
            print(f"{row['number']:5d}  {seconds:6.1f} s  {bad or ''}  {sorted(row['found'])}", flush=True)

    def show(self) -> None:
        """A line for each fault."""
        for fault in FAULTS:
            mine = [row for row in self.rows if fault.name in row["found"]]
            num_reached = sum(fault.name in row["reached"] for row in self.rows)
            first = min(mine, key=lambda row: row["number"], default=None)
            said = "not found" if first is None else f"{first['number']:5d}  {first['found'][fault.name][0]}"
            print(f"{said:18s} reached by {num_reached:4d} of {len(self.rows)}  {fault.file}: {fault.name}")

    def confirm(self) -> None:
        """Runs what has found a fault in a copy of the source with its text."""
        for fault in FAULTS:
            number = min((row["number"] for row in self.rows if fault.name in row["found"]), default=None)
            if number is not None:
                with tempfile.TemporaryDirectory(prefix="power_", ignore_cleanup_errors=True) as folder:
                    root = Path(folder)
                    for part in ("src", "tests", "benchmarks/fuzz"):
                        shutil.copytree(ROOT / part, root / part)
                    (root / "docs").mkdir()
                    for file in ("benchmarks/common.py", "docs/limits.md"):
                        shutil.copy2(ROOT / file, root / file)
                    package = root / "src" / "farspan"
                    (package / fault.file).write_text(faulted_text(fault, package))
                    words = ["--only", number, "--seed", self.args.seed, "--no-shrink", "--workers", 1]
                    command = [sys.executable, str(root / "benchmarks/fuzz/run.py"), *map(str, words)]
                    environment = os.environ | {"PYTHONPATH": f"{package.parent}:{root}"}
                    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TASK_S)
                is_found = any(kind in line for line in ran.stdout.splitlines()[:2] for kind in FINDINGS)
                print(f"{number:5d}  {'found again' if is_found else 'NOT FOUND AGAIN'}  {fault.name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("power.jsonl"), help="rows are added to it")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument(
        "--first", type=int, default=100, help="so many are run with all faults, later ones where needed"
    )
    parser.add_argument("--begin", type=int, default=0, help="the number of the first program")
    parser.add_argument("--most-s", type=float, default=0.0, help="seconds; 0: no limit")
    parser.add_argument("--seed", type=int, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--grammar", default="first", help="a name of the grammar that programs are drawn from")
    parser.add_argument("--only", nargs="*", help="names of faults")
    parser.add_argument("--confirm", action="store_true")
    args = parser.parse_args()
    power = Power(args)
    if args.confirm:
        power.confirm()
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        threads = [threading.Thread(target=power.work, args=(folder,)) for _ in range(args.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    power.show()


if __name__ == "__main__":
    main()

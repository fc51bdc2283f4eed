"""What becomes of bad files, command lines and variables: an error in three parts, and nothing else.

Each case is tried in a process that is used again, by the same entry as the command `farspan` has, and every 25th also
as a command of its own. A case that takes longer than 5 s, or more than 512 MiB more than the process had, is a hang.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.bad_input.cases import RIGHT_FILES, Case, all_cases  # noqa: E402
from benchmarks.common import arguments, finish  # noqa: E402

LIMIT_S, LIMIT_MIB = 5.0, 512
START_S = 60.0
EVERY = 25
SEED = 20261123
ENDS = ("traceback", "hang", "wrongly taken", "wrongly refused", "no three parts", "control characters")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")
_ENVIRONMENT = {
    **{name: text for name, text in os.environ.items() if not name.startswith(("FARSPAN_", "SLURM_"))},
    "PYTHONPATH": str(ROOT / "src"),
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
}


class Worker:
    """A process that tries cases; a new one is started after one that had to be killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def try_case(self, case: Case, folder: Path) -> dict[str, Any]:
        """What comes of a case: exit code, output, traceback, seconds and MiB; "killed" says why there is none."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_ENVIRONMENT,
            )
            assert not self._answer(START_S, float("inf")).get("killed"), "no worker could be started"
        assert self._process.stdin is not None
        request = {"folder": str(folder), "call": case.call, "words": case.words, "variables": case.variables}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(LIMIT_S, LIMIT_MIB)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _answer(self, limit_s: float, limit_mib: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        began, before, most, data = time.monotonic(), self._resident_mib(), 0.0, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not data.endswith(b"\n"):
                took = time.monotonic() - began
                most = max(most, self._resident_mib() - before)
                if took > limit_s or most > limit_mib or self._process.poll() is not None:
                    why = f"after {took:.1f} s with {most:.0f} MiB more"
                    self.close()
                    return {"killed": why, "seconds": took, "mib": most}
                if selector.select(timeout=0.02):
                    data += os.read(self._process.stdout.fileno(), 1 << 20)
        return {**json.loads(data), "seconds": time.monotonic() - began, "mib": most}

    def _resident_mib(self) -> float:
        assert self._process is not None
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0.0
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def fill(folder: Path, case: Case) -> None:
    """Make a fresh folder with the files of a case."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, contents in {**RIGHT_FILES, **case.files}.items():
        path = folder / name
        if isinstance(contents, bytes):
            path.write_bytes(contents)
        elif contents == "folder":
            path.mkdir()
        elif contents == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero" if contents == "zeros" else name)


def run_alone(case: Case, folder: Path) -> dict[str, Any]:
    """The same as a command of its own, which may take as long as Python needs to start."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "farspan", *(os.fsencode(word) for word in case.words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=_ENVIRONMENT | case.variables,
            timeout=LIMIT_S + START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"killed": "a command of its own", "seconds": time.monotonic() - began, "mib": 0.0}
    output = done.stdout.decode(errors="surrogateescape")
    found = output if "Traceback (most recent call last)" in output else ""
    return {"code": done.returncode, "output": output, "traceback": found, "seconds": 0.0, "mib": 0.0}


def judged(case: Case, found: dict[str, Any]) -> list[str]:
    """What is wrong about the end of a case; nothing if all is well."""
    if "killed" in found:
        return ["hang"]
    if found["traceback"]:
        return ["traceback"]
    problems: list[str] = []
    if found["code"] != 0 and case.is_right:
        problems.append("wrongly refused")
    if found["code"] == 0 and case.is_right is False:
        problems.append("wrongly taken")
    if found["code"] != 0 and (found["code"] != 2 or case.call == "cli"):
        has_parts = "\n  why  " in found["output"] and "\n  try  " in found["output"]
        if found["code"] != 2 or not has_parts:
            problems.append("no three parts")
    if _CONTROL.search(found["output"]):
        problems.append("control characters")
    return problems


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random numbers")
    args = parser.parse_args()
    cases = all_cases(200 if args.quick else args.cases, args.seed)
    worker, rows, num_alone = Worker(), list[dict[str, Any]](), 0
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base, "case")
        try:
            for number, case in enumerate(cases):
                fill(folder, case)
                tries = [worker.try_case(case, folder)]
                if case.call == "cli" and (number % EVERY == 0 or case.is_right):
                    fill(folder, case)
                    tries.append(run_alone(case, folder))
                    num_alone += 1
                problems = sorted({problem for found in tries for problem in judged(case, found)})
                first = tries[0]
                rows.append({"case": case.what[:200], "problems": problems, **{key: first.get(key) for key in first}})
                if problems:
                    shown = first.get("killed") or first["traceback"] or first["output"]
                    print(f"{number}: {case.what[:200]}: {', '.join(problems)}\n{shown[-1500:]}", flush=True)
        finally:
            worker.close()
    counts = Counter(problem for row in rows for problem in row["problems"])
    taken = sum(row.get("code") == 0 for row in rows)
    slowest, largest = max(row["seconds"] for row in rows), max(row["mib"] for row in rows)
    print(f"{taken} taken, {len(rows) - taken} refused; {num_alone} also as commands of their own")
    print(f"the slowest took {slowest:.2f} s, the largest {largest:.0f} MiB")
    figure = f"{len(rows)} cases: " + ", ".join(f"{counts[end]} {end}" for end in ENDS)
    for row in rows:
        row["output"] = (row.get("output") or "")[:500]
    finish(args, rows=rows, figure=figure, holds=not counts)


if __name__ == "__main__":
    main()

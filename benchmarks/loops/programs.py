"""The programs of examples/loops: the line that is added to one, a run of it, and how two runs compare."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["LOOPS", "Run", "added_line", "compare", "names", "run_program"]

ROOT = Path(__file__).resolve().parents[2]
LOOPS = ROOT / "examples" / "loops"
CLOSE = 1e-6
_MARK = re.compile(r"^# farspan: (.*)$", re.MULTILINE)
_ERROR = re.compile(
    r"^(?:\[rank\d+\]: +)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a program: what it printed and left, rank by rank, or why it failed."""

    text: str
    results: list[dict[str, Any]]
    time_s: float
    error: str = ""


def names() -> list[str]:
    return sorted(file.stem for file in LOOPS.glob("*.py"))


def added_line(name: str) -> str:
    """The line that distributes the program, which stands in it as a comment, after the lines that build the model."""
    (line,) = _MARK.findall((LOOPS / f"{name}.py").read_text())
    return line


def run_program(name: str, num_ranks: int | None, *, timeout_s: float) -> Run:
    """Run a program as it is, or with the line added (and `import farspan`) over some ranks."""
    program = LOOPS / f"{name}.py"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable]
        if num_ranks is not None:
            text = _MARK.sub(r"import farspan\n\1", program.read_text())
            program = Path(folder, program.name)
            program.write_text(text)
            command += ["-m", "farspan", "run", "-n", str(num_ranks), "--log-dir", folder]
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        path = [str(LOOPS), str(ROOT / "src"), environment.get("PYTHONPATH", "")]
        environment.update(
            PYTHONPATH=os.pathsep.join(path), OMP_NUM_THREADS="1", LOOPS_RESULT=folder, FARSPAN_FILES="all"
        )
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, str(program)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # the launcher ends its ranks, and those that do not listen
            out, err = process.communicate()
            return Run(text=out, results=[], time_s=time.monotonic() - began, error=f"not done after {timeout_s:g} s")
        time_s = time.monotonic() - began
        if process.returncode:
            return Run(text=out, results=[], time_s=time_s, error=_reason(err) or f"exit status {process.returncode}")
        return Run(text=out, results=_results(folder, num_ranks or 1), time_s=time_s)


def compare(wanted: Run, got: Run, *, num_lines: int) -> tuple[str, float]:
    """How a run compares with another one, in a word or two, and the largest relative difference of any number.

    "bitwise": the last `num_lines` printed lines are the same (farspan shows its plan before them), and so are all
    numbers and weights that each rank has left.
    """
    if error := wanted.error or got.error:
        return error, float("inf")
    (reference,) = wanted.results[:1]
    difference = max(_difference(reference, result) for result in got.results)
    if difference == 0 and _own_text(got, num_lines) == _own_text(wanted, num_lines):
        return "bitwise", 0.0
    if difference == 0:
        return "other text", float("inf")
    return f"{'close' if difference < CLOSE else 'differs by'} {difference:.0e}", difference


def _own_text(run: Run, num_lines: int) -> list[str]:
    return run.text.splitlines()[-num_lines:]


def _results(folder: str, num_ranks: int) -> list[dict[str, Any]]:
    import torch

    return [torch.load(Path(folder, f"rank{rank}.pt")) for rank in range(num_ranks)]


def _difference(wanted: dict[str, Any], got: dict[str, Any]) -> float:
    """The largest difference, relative to the largest number of each tensor; numbers are compared one by one."""
    import torch

    if len(wanted["numbers"]) != len(got["numbers"]) or wanted["weights"].keys() != got["weights"].keys():
        return float("inf")
    numbers = zip(wanted["numbers"], got["numbers"], strict=True)
    pairs = [(torch.tensor(a).double(), torch.tensor(b).double()) for a, b in numbers]
    pairs += [(tensor, got["weights"][name]) for name, tensor in wanted["weights"].items()]
    worst = 0.0
    for a, b in pairs:
        if a.dtype != b.dtype or a.shape != b.shape:
            return float("inf")
        if not torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)):
            relative = (a.double() - b.double()).abs().max() / (a.double().abs().max() + 1e-12)
            worst = max(worst, relative.nan_to_num(float("inf")).item(), 1e-300)
    return worst


def _reason(text: str) -> str:
    """The first line of the last error that a program has printed."""
    found = _ERROR.findall(text)
    return found[-1][:200] if found else text.strip().rpartition("\n")[2][:200]

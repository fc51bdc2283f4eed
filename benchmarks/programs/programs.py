"""The programs in scripts/: what one needs, the line that is added to it, and a run of it in a fresh folder."""

from __future__ import annotations

import ast
import importlib.machinery
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.programs.compare import differing_files, differing_lines, differing_objects

__all__ = ["PACKAGES", "SCRIPTS", "Run", "added_line", "differences", "missing_packages", "names", "run_program"]

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "scripts"
PACKAGES = Path(os.environ.get("BENCHMARK_PACKAGES") or ROOT / ".packages-programs")
"""Where `make programs-packages` puts optimizers that come from pip."""
OPTIONAL = ("lion_pytorch", "prodigyopt", "pytorch_optimizer", "schedulefree", "timm")
ENTROPY = "20261122"
_MARK = re.compile(r"^([ \t]*)# farspan: (.*)$", re.MULTILINE)
_ERROR = re.compile(
    r"^(?:\[rank\d+\]: +)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a program: what it printed, the folder it ran in, what each rank ended with, or why it failed."""

    text: str
    folder: Path
    results: Path
    num_ranks: int
    time_s: float
    error: str = ""


def names() -> list[str]:
    return sorted(file.stem for file in SCRIPTS.glob("*.py"))


def added_line(name: str) -> str:
    """The line that distributes the program, which stands in it as a comment, after the lines that build the model."""
    ((_, line),) = _MARK.findall((SCRIPTS / f"{name}.py").read_text())
    return line


def missing_packages(name: str) -> list[str]:
    """The packages that a program imports and that are neither installed nor in PACKAGES."""
    find = importlib.machinery.PathFinder.find_spec
    return sorted(package for package in _needed(name) if find(package, [*sys.path, str(PACKAGES)]) is None)


def _needed(name: str) -> set[str]:
    tree = ast.parse((SCRIPTS / f"{name}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {module.partition(".")[0] for module in imported} & set(OPTIONAL)


def run_program(name: str, num_ranks: int | None, folder: Path, *, timeout_s: float, hash_seed: str = "random") -> Run:
    """Run a program as it is, or with the line added over some ranks.

    Args:
        name: The script, without ".py".
        num_ranks: None runs it plainly, without farspan.
        folder: An empty one, which must outlive the result.
        timeout_s: When it is ended.
        hash_seed: PYTHONHASHSEED; by default every process has its own.
    """
    work, private = folder / "work", folder / "private"
    # a cache, into which all ranks write: what else another rank than the first writes is its own
    results = private / "cache" / "results"
    for made in (work, results):
        made.mkdir(parents=True)
    source = (SCRIPTS / f"{name}.py").read_text()
    command = [sys.executable]
    if num_ranks is not None:
        source = _MARK.sub(r"\1import farspan\n\1\2", source)
        command += ["-m", "farspan", "run", "-n", str(num_ranks), "--log-dir", str(private)]
    program = private / f"{name}.py"
    program.write_text(source + "\n__import__('end_of_program').leave(globals())\n")
    path = [str(HERE / "hook"), str(ROOT / "src"), str(PACKAGES), os.environ.get("PYTHONPATH", "")]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": hash_seed}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(private / "cache")}
    environment |= {"PROGRAMS_RESULT": str(results), "PROGRAMS_ENTROPY": ENTROPY}
    if num_ranks is None:
        environment["PROGRAMS_PLAIN"] = "1"
    if "timm" in _needed(name):
        environment["PROGRAMS_TIMM"] = "1"
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, str(program)],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    error = ""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the launcher ends its ranks, and those that do not listen
        out, err = process.communicate()
        error = f"not done after {timeout_s:g} s"
    if process.returncode and not error:
        error = _reason(err) or f"exit status {process.returncode}"
    (private / "stderr").write_text(err)
    time_s = time.monotonic() - began
    return Run(text=out, folder=work, results=results, num_ranks=num_ranks or 1, time_s=time_s, error=error)


def differences(wanted: Run, got: Run) -> list[str]:
    """All in which a run differs from the plain one: its end, lines, files, and each rank's generators and weights."""
    if error := wanted.error or got.error:
        return [error]
    found: list[str] = []
    if lines := differing_lines(wanted.text, got.text):
        found.append(f"printed {lines}")
    found += differing_files(wanted.folder, got.folder)
    reference = _end(wanted, 0)
    for rank in range(got.num_ranks):
        if rank and (lines := differing_lines(wanted.text, (got.results / f"rank{rank}.out").read_text())):
            found.append(f"rank {rank} printed {lines}")
        end = _end(got, rank)
        for part in reference:
            if difference := differing_objects(reference[part], end[part]):
                found.append(f"{part} of rank {rank}: {difference}")
    return found


def _end(run: Run, rank: int) -> dict[str, Any]:
    import torch

    left = torch.load(run.results / f"end{rank}.pt", weights_only=False)
    generators = {f"generator {name}": state for name, state in left["generators"].items()}
    # cloned: a loop's variable may be the same module under a second name, and what each reading gives is its own
    return generators | {"weights": {name: weight.clone() for name, weight in left["weights"].items()}}


def _reason(text: str) -> str:
    """The first line of the last error that a program has printed."""
    found = _ERROR.findall(text)
    return found[-1][:200] if found else text.strip().rpartition("\n")[2][:200]


def run_and_compare(name: str, num_ranks: int, wanted: Run, *, timeout_s: float) -> tuple[list[str], float]:
    """The differences of a run over some ranks, in a folder of its own, and its time."""
    with TemporaryDirectory() as folder:
        got = run_program(name, num_ranks, Path(folder), timeout_s=timeout_s)
        return differences(wanted, got), got.time_s

"""Runs pytest over the tree with the planted faults."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.mutants.reached import Map, read_map

__all__ = ["map_tests", "pytest_command", "read_rows", "refresh_tool"]

_READ_SOURCES = (
    "tests/test_imports.py",
    "tests/test_docs.py",
    "tests/test_api_names.py",
    "tests/benchmarks/test_mutants.py",
)
"""Tests of the texts of sources, which are other texts in the tree."""
_LONGEST_TEST_S = 900
_USAGE_ERROR = 4
_MOST_DEATHS = 3
"""Of the processes that run the same files."""


def pytest_command(tree: Path, plugin: str, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a run of tests in the tree, whose folder it is to be run in."""
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", "-q", "--tier=quick"]
    command += ["-o", f"timeout={_LONGEST_TEST_S}", *(f"--ignore={name}" for name in _READ_SOURCES), *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MUTANTS_")}
    path = os.pathsep.join([str(tree / "src"), str(tree)])
    return command, {**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def refresh_tool(root: Path, tree: Path) -> None:
    """Copies the tool itself into the tree, which may be older."""
    shutil.copytree(root / "benchmarks" / "mutants", tree / "benchmarks" / "mutants", dirs_exist_ok=True)


def read_rows(folder: Path) -> Map:
    """The map of the tests, as far as it has been made."""
    return read_map(folder.glob("map*.jsonl"))


def map_tests(tree: Path, folder: Path, paths: Sequence[str], *, num_workers: int, num_files: int) -> None:
    """Runs the tests of these files and folders of the tree, those that have a row in the folder left out.

    Args:
        tree: With the planted faults.
        folder: The rows are in `map*.jsonl` there, and the outputs beside them.
        paths: From the tree.
        num_workers: Processes at a time.
        num_files: Files of tests that a process runs.
    """
    files = _files(tree, paths)
    examples = [name for name in files if name.startswith("src")]
    files = [name for name in files if name not in examples]
    chunks = [files[start :: max(1, -(-len(files) // num_files))] for start in range(-(-len(files) // num_files))]
    if examples:  # together: what pytest imports first is an attribute of its package
        chunks.append(examples)
    running: dict[int, tuple[subprocess.Popen[bytes], list[str], int]] = {}
    try:
        _run_chunks(tree, folder, chunks, num_workers, running)
    finally:
        for process, _, _ in running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (*folder.glob("*.reached"), *folder.glob("*.start"), *folder.glob("*.collected")):
            file.unlink(missing_ok=True)  # of servers, which end last


def _run_chunks(
    tree: Path,
    folder: Path,
    chunks: Sequence[list[str]],
    num_workers: int,
    running: dict[int, tuple[subprocess.Popen[bytes], list[str], int]],
) -> None:
    """Runs files of tests; `running` has the processes of this moment, their files, and how often they have died."""
    waiting = [(chunk, 0) for chunk in chunks]
    while waiting or running:
        while waiting and len(running) < num_workers:
            chunk, num_tries = waiting.pop(0)
            worker = min(set(range(num_workers)) - set(running))
            running[worker] = (_start(tree, folder, chunk, worker), chunk, num_tries)
        time.sleep(0.2)
        for worker, (process, chunk, num_tries) in list(running.items()):
            if process.poll() is None:
                continue
            del running[worker]
            print(f"{len(chunk)} files, exit code {process.returncode}; {len(waiting)} times as many wait", flush=True)
            if process.returncode == _USAGE_ERROR:
                sys.exit(f"pytest does not take {' '.join(chunk)}: see {folder / f'map{worker}.log'}")
            if _note_death(folder, worker) and num_tries < _MOST_DEATHS:
                waiting.append((chunk, num_tries + 1))


def _files(tree: Path, paths: Sequence[str]) -> list[str]:
    """The files of tests, and folders of modules, which may have examples in their docstrings."""
    found: list[str] = []
    for path in paths:
        whole = tree / path
        if whole.is_dir() and not path.startswith("src"):
            names = sorted(whole.rglob("test_*.py"))
            found += [name.relative_to(tree).as_posix() for name in names if "programs" not in name.parts[:-1]]
        else:
            found.append(path)
    return [name for name in dict.fromkeys(found) if name not in _READ_SOURCES]


def _start(tree: Path, folder: Path, files: Sequence[str], worker: int) -> subprocess.Popen[bytes]:
    command, environment = pytest_command(tree, "benchmarks.mutants.record", files)
    rows = folder / f"map{worker}.jsonl"
    done = folder / f"map{worker}.done"
    done.write_text("\n".join(read_rows(folder).tests))
    environment |= {
        "MUTANTS_ROWS": str(rows),
        "MUTANTS_DONE": str(done),
        "MUTANTS_REACHED": str(folder / f"map{worker}.start"),
    }
    rows.with_suffix(".current").unlink(missing_ok=True)
    with (folder / f"map{worker}.log").open("ab") as log:
        return subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _note_death(folder: Path, worker: int) -> bool:
    """Whether the process ended in a test, which gets a row."""
    rows = folder / f"map{worker}.jsonl"
    current = rows.with_suffix(".current")
    if not current.exists():
        return False
    if (name := current.read_text()) not in read_rows(folder).tests:
        with rows.open("a") as file:
            row = {"test": name, "outcome": "died", "wall_s": _LONGEST_TEST_S, "cpu_s": 0, "reached": "0", "uses": []}
            file.write(f"\n{json.dumps(row)}\n")
    return True

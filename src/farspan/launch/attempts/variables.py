"""The variables that the ranks of one start have in common, and the folder by which they find each other."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from farspan.launch.files import keeps_apart
from farspan.settings import PREFIX

__all__ = ["make_run_folder", "own_threads", "shared_variables"]


def make_run_folder(shared: dict[str, str], num_processes: int, files: str | None) -> str | None:
    """Make the folder, which is this user's alone, where the ranks find each other, and for the files of other ranks
    than 0; every Python that starts learns of it by `shared`.
    """
    shared["FARSPAN_FILES"] = files or shared.get("FARSPAN_FILES") or os.environ.get("FARSPAN_FILES") or "first"
    keeps_apart(shared["FARSPAN_FILES"])  # raises if it is no choice
    if num_processes == 1:
        shared["FARSPAN_RUN_FOLDER"] = ""
        return None
    folder = shared["FARSPAN_RUN_FOLDER"] = tempfile.mkdtemp(prefix="farspan-run-")
    shared[f"{PREFIX}STORE"] = str(Path(folder) / "store")
    site = str(Path(__file__).parents[1] / "files" / "site")
    known = shared.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    shared["PYTHONPATH"] = os.pathsep.join([each for each in (site, known) if each])
    return folder


def shared_variables(num_processes: int, log_dir: Path) -> dict[str, str]:
    """Returns the variables that all ranks of a run on this machine get, but those of one start."""
    return {
        f"{PREFIX}WORLD_SIZE": str(num_processes),
        f"{PREFIX}LOCAL_WORLD_SIZE": str(num_processes),
        **own_threads(num_processes),
        "PYTHONUNBUFFERED": "1",
        "FARSPAN_LAUNCHER": "run",
        "FARSPAN_LOG_DIR": str(log_dir),
    }


def own_threads(num_processes: int) -> dict[str, str]:
    """Returns the variable that gives each process of this machine its share of the cores."""
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores // num_processes))}

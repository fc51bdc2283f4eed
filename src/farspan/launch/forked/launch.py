"""`farspan.launch(function, processes=4)`: runs a function in several ranks, from a notebook or a session.

    this process --fork--> rank 0 --pipes--> this process's sys.stdout and sys.stderr: the cell; LOG_DIR/rank0.log
                 --fork--> rank 1 --> LOG_DIR/rank1.log
                 ...

Each rank begins with a copy of all that is in memory here; what it changes there is not seen here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from typing import Any

from farspan.errors import LaunchError, quoted
from farspan.settings import PREFIX

__all__ = ["launch"]

_MOST_PROCESSES = 4096


def launch(function: Callable[..., Any], *args: Any, processes: int | None = None, **kwargs: Any) -> None:
    """Runs a function in several ranks that are forks of this process, and returns when all have ended.

    What rank 0 prints appears here. Nothing is returned: let the function save what is to stay (`farspan.save`).

    Args:
        function: What each rank runs; it calls `farspan.distribute`. It may be defined in a notebook.
        *args: What it is given.
        processes: Number of ranks; it must be given.
        **kwargs: What it is given, by name.

    Raises:
        TypeError: `processes` is not given.
        LaunchError: A rank has failed, or this process cannot be forked: it uses a GPU, or has distributed a model.
    """
    import queue
    import shutil
    import tempfile
    from pathlib import Path

    from farspan.launch.attempts import Attempt, shared_variables
    from farspan.launch.forked.forked_rank import ForkedCrew
    from farspan.launch.job import Events, signals_to

    if processes is None:
        raise TypeError(f"launch() needs processes=, the number of ranks{_advice(kwargs)}")
    _check(processes)
    folder = Path(tempfile.mkdtemp(prefix="farspan-"))
    events: Events = queue.SimpleQueue()
    try:
        with signals_to(events):
            outcome = Attempt(
                events,
                lambda variables: ForkedCrew(lambda: function(*args, **kwargs), processes, variables),
                processes,
                log_dir=folder,
                variables=shared_variables(processes, folder),
                files=None,
                grace_s=5.0,
                comes_again=False,
            ).run(_write)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if outcome.code:
        lines = outcome.text.splitlines()
        first = lines[0].removeprefix("farspan run: ") if lines else "a rank has failed."
        raise LaunchError(first, why="its own output is above.", hint=f"the logs of all ranks are in {folder}")
    shutil.rmtree(folder, ignore_errors=True)


def _advice(keywords: Collection[str]) -> str:
    import difflib  # only where it is of use

    near = difflib.get_close_matches("processes", keywords, n=1)
    return f": did you mean it by {near[0]}=?" if near else ""


def _write(text: str) -> None:
    """Writes where a notebook shows it, which the file descriptor of standard error is not."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _check(processes: int) -> None:
    if type(processes) is not int or not 1 <= processes <= _MOST_PROCESSES:
        raise LaunchError(
            f"cannot start {quoted(processes) if type(processes) is not int else processes} processes.",
            why=f"the number of processes is a whole number from 1 to {_MOST_PROCESSES}.",
            hint="farspan.launch(train, processes=4)",
        )
    if not hasattr(os, "fork"):
        raise LaunchError(
            "this system cannot fork a process.", why=sys.platform, hint="farspan run -n 4 train.py, with a script"
        )
    number, total = (os.environ.get(f"{PREFIX}{name}", "1") for name in ("RANK", "WORLD_SIZE"))
    if total != "1":
        raise LaunchError(
            f"this process is rank {number} of {total} itself.",
            why="each rank would start ranks of its own, which know nothing of the others.",
            hint="call the function; or start the script with python, and not in several processes",
        )
    if "torch" in sys.modules and _uses_accelerator():
        raise LaunchError(
            "this process already uses a GPU.",
            why="a fork of it cannot use CUDA.",
            hint="restart the kernel, and let nothing but the function touch a GPU",
        )
    world: Any = sys.modules.get("farspan.execute.process.world")
    if world is not None and world.current_engine() is not None:
        raise LaunchError(
            "this process has distributed a model.",
            why="its ranks would be forks of a process that is a rank itself.",
            hint="restart the kernel, and call farspan.distribute in the function alone",
        )


def _uses_accelerator() -> bool:
    from farspan.devices import is_in_use

    return is_in_use()

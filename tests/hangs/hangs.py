"""A test that hangs ends with the stacks of all its ranks, whether they are threads or processes.

A process that has called `show_stacks_at_end` writes the stacks of all its threads when it gets SIGVTALRM, a signal
that nothing else uses, and then dies of it. The handler is written in C, so it works even where one thread never lets
the others run. All ranks get the signal at once, before any of them can notice that another one has ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

__all__ = ["PATIENCE_S", "SETUP", "descendants", "ended_in_time", "show_stacks", "show_stacks_at_end", "stacks_of"]

PATIENCE_S = 20.0
"""How long a process that was told to show its stacks may take to do so and to end."""
SETUP = "import faulthandler as _f, signal as _s; _f.register(_s.SIGVTALRM, chain=True); "
"""For the first line of a script: what `show_stacks_at_end` does."""


def show_stacks_at_end(file: int = 2) -> None:
    """Lets this process write the stacks of all its threads into an open file when another one calls `show_stacks`."""
    faulthandler.register(signal.SIGVTALRM, file=file, all_threads=True, chain=True)


def show_stacks(pids: Iterable[int]) -> None:
    """Ends processes; each shows its stacks if it has called `show_stacks_at_end`."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGVTALRM)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and that those have started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def ended_in_time(process: subprocess.Popen[Any], timeout_s: float, logs: Path, *outputs: Path) -> tuple[Any, Any]:
    """Returns what a launcher has written, once it has ended.

    If it takes too long, the error shows the stacks of its ranks, which are in the files of the folder `logs`, and
    what is in the files that it writes to in the place of pipes.
    """
    try:
        return process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        show_stacks(descendants(process.pid))
    try:  # the launcher passes on what the ranks have written, and ends with them
        written = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        show_stacks([process.pid])
        process.kill()
        written = process.communicate()
    texts = [f"{path.name}:\n{path.read_text(errors='replace')}" for path in [*outputs, *sorted(logs.glob("**/*.log"))]]
    raise AssertionError("\n".join([f"not ended after {timeout_s} s", *filter(None, written), *texts]))


def stacks_of(threads: Mapping[str, threading.Thread]) -> str:
    """The stacks of those of these threads of this process that are running, under their names."""
    frames = sys._current_frames()
    return "\n".join(
        f"{name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for name, thread in threads.items()
        if thread.is_alive() and thread.ident in frames
    )

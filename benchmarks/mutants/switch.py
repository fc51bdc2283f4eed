"""The switch of the planted faults: a copy of this file is `farspan/_faults.py` in the tree that `plant` writes.

`_farspan_fault(number)`, a builtin, is whether the fault of this number is active. The first time that a process comes
to a point it reads the environment, and notes the point in a file: the processes that a test starts, also those that
are forked from servers with another environment, know what is active and are part of what the test reaches.

    MUTANTS_FAULT      the active fault
    MUTANTS_REACHED    file that points are noted in: `NUMBER`, `pid PROCESS`, and `cpu PROCESS SECONDS` as it ends
"""

from __future__ import annotations

import atexit
import builtins
import os
import time
from collections.abc import Callable

__all__ = ["fault", "renew"]


def _make() -> tuple[Callable[[int], bool], Callable[[], None]]:
    """Makes the two functions: closures, which work until the interpreter's end, over functions that nobody patches."""
    reached: set[int] = set()
    known: set[int] = set()
    active = -1
    environment, getpid = os.environ, os.getpid
    open_file, write, close, modes = os.open, os.write, os.close, os.O_WRONLY | os.O_APPEND | os.O_CREAT

    def note(number: int) -> None:
        nonlocal active
        reached.add(number)
        active = int(environment.get("MUTANTS_FAULT", "-1"))
        append(f"{number}\n")

    def append(text: str) -> None:
        path = environment.get("MUTANTS_REACHED")
        if not path:
            return
        if (pid := getpid()) not in known:
            known.clear()
            known.add(pid)
            text = f"pid {pid}\n{text}"
        try:
            file = open_file(path, modes, 0o600)
        except OSError:
            return
        try:
            write(file, text.encode())
        except OSError:
            pass
        finally:
            close(file)

    def fault(number: int) -> bool:
        if number not in reached:
            note(number)
        return number == active

    def renew() -> None:
        reached.clear()
        known.clear()

    atexit.register(lambda: append(f"cpu {getpid()} {time.process_time():.3f}\n"))
    os.register_at_fork(after_in_child=renew)
    return fault, renew


fault, renew = _make()
"""Whether a fault is active; and: forget what has been reached, and read the environment again."""

builtins._farspan_fault = fault  # pyright: ignore[reportAttributeAccessIssue]

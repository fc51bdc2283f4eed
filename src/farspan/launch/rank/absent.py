"""A rank that ends before it has called `farspan.distribute` says so: the others raise instead of waiting.

`farspan run` sees by itself that one of its processes has ended; under another launcher the process leaves word in the
store of the job, if anybody can be waiting there. A process of its own does that: a Python that is about to end cannot
import torch. `import farspan` brings this module, so what is needed at the end only is imported then.
"""

from __future__ import annotations

import functools
import os
import sys

from farspan.launch.rank.process_end import at_process_end

__all__ = ["note_coming", "watch_end"]

_CONNECTING_S = 2.0
_TELLING_S = 60.0
_processes_that_came: set[int] = set()


def note_coming() -> None:
    """Say that this process has called `farspan.distribute`: from now on the others hear of its end by other ways."""
    _processes_that_came.add(os.getpid())


def watch_end(messenger: str) -> None:
    """See this process end, and tell the others if they may wait for it in vain.

    A process that a rank has started has the rank's variables, but is no rank. A launcher makes a process group for
    each of its ranks; what a rank starts belongs to that one.

    Args:
        messenger: The module that leaves the word, as `python -m messenger WHY`.
    """
    if hasattr(os, "getpgrp") and os.getpgrp() == os.getpid():
        at_process_end(functools.partial(_at_end, os.getpid(), messenger))


def _at_end(process: int, messenger: str) -> None:
    if os.getpid() != process:
        return
    from farspan.errors import FarspanError
    from farspan.launch.rank.error_file import is_of_another_rank, leave_error

    error: BaseException | None = getattr(sys, "last_value", None)
    if error is not None:
        leave_error(error, is_heard=is_of_another_rank(error))
    if process in _processes_that_came:
        return
    import logging
    import subprocess

    try:
        if _may_be_awaited():
            why = "its program is over" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
            command = [sys.executable, "-m", messenger, why]
            subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_TELLING_S, check=True)
    except (FarspanError, OSError, subprocess.SubprocessError) as problem:  # whoever hosts the store has gone too
        logging.getLogger(__name__).debug("nobody could be told that this rank ends: %s", problem)


def _may_be_awaited() -> bool:
    """Returns whether this process is one of several ranks whose rendezvous store exists."""
    import socket

    from farspan.launch.environment import hosts_store, read_environment

    environment = read_environment()
    if environment.world_size == 1 or environment.master_addr is None or environment.master_port is None:
        return False
    if hosts_store(environment):
        return False  # the others find nobody at that address
    groups = sys.modules.get("torch.distributed")
    if groups is not None and groups.is_available() and groups.is_initialized():
        return False  # the script is one for several processes, which need not end together
    with socket.create_connection((environment.master_addr, environment.master_port), timeout=_CONNECTING_S):
        return True  # torch would wait for somebody to listen

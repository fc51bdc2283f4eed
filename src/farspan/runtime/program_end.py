"""How a rank's program ends: the other ranks hear of it.

    its last line        the rank waits until every program is over, and answers what the others ask until then
    an exception         the others are told first, and only then is it printed: a full disk must not hide the cause
    a forked child       is no rank: it ends as if farspan were not there

Then what farspan has opened is closed.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType

from farspan.errors import DivergenceError, FarspanError, PlanError, RemoteError
from farspan.launch.rank.error_file import leave_error
from farspan.outputs import write_line
from farspan.runtime.abort.aborted import rank_that_raised
from farspan.runtime.engine import Engine
from farspan.runtime.media import Roads
from farspan.runtime.side.text import first_line

__all__ = ["watch_end"]

_LINGER_S = 10.0
_LINGER_AFTER_FAILURE_S = 2.0
"""The others have been told; one that is stopped would keep all of them."""
_exit_codes: list[int] = []


def watch_end(engine: Engine, roads: Roads, remove_files: Callable[[], None]) -> None:
    """From now on the end of this process is told to the other ranks."""
    process, previous = os.getpid(), sys.excepthook
    has_raised = False

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal has_raised
        if os.getpid() != process:
            previous(kind, error, trace)
            return
        has_raised = True
        heard = _heard_from_others(error)
        leave_error(error, is_heard=bool(heard))
        if heard:
            write_line(heard)
            return
        if not isinstance(error, (PlanError, DivergenceError)):  # every rank finds these by itself
            engine.side.fail(error)
        previous(kind, error, trace)

    def leave() -> None:
        if os.getpid() != process:
            return
        try:
            if not has_raised and engine.is_healthy:
                engine.finish()
        except FarspanError as error:
            _exit_codes.append(1)  # the program has ended well by itself, but the ranks did not do the same
            leave_error(error, is_heard=isinstance(error, RemoteError))
            write_line(f"{type(error).__name__}: {error}")
        roads.close()
        remove_files()
        engine.values.close()
        is_over_well = not has_raised and engine.is_healthy
        engine.side.close(linger_s=_LINGER_S if is_over_well else _LINGER_AFTER_FAILURE_S)

    sys.excepthook = tell
    atexit.register(leave)


def _heard_from_others(error: BaseException) -> str:
    """What to print of an error that another rank has raised, which shows its traceback itself; "" for one's own."""
    if isinstance(error, RemoteError):
        return f"{type(error).__name__}: {error}"
    raised_by = rank_that_raised(error)
    if raised_by is None:
        return ""
    return f"{RemoteError.__name__}: rank {raised_by} failed: {type(error).__name__}: {first_line(error)}"


def _exit_as_failed() -> None:
    """Runs after all that the program wants done at its end, for it was registered before."""
    if _exit_codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_codes[0])


atexit.register(_exit_as_failed)

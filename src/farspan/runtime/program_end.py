"""How a rank's program ends: the other ranks hear of it.

    its last line        the rank waits until every program is over, and answers what the others ask until then
    an exception         the others are told first, and only then is it printed: a full disk must not hide the cause
    a forked child       is no rank: it ends as if farspan were not there

Then what farspan has opened is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Callable
from types import TracebackType

from farspan.errors import DivergenceError, FarspanError, PlanError, RemoteError
from farspan.outputs import write_line
from farspan.runtime.abort.aborted import rank_that_raised
from farspan.runtime.engine import Engine
from farspan.runtime.media import Roads
from farspan.runtime.side.text import first_line

__all__ = ["watch_end"]

_LINGER_S = 10.0
_LINGER_AFTER_FAILURE_S = 2.0
"""The others have been told; one that is stopped would keep all of them."""
_HEARD_LATER_S = 10
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
        _leave_for_torchrun(error, trace, is_heard=bool(heard))
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
            _leave_for_torchrun(error, error.__traceback__, is_heard=isinstance(error, RemoteError))
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


def _leave_for_torchrun(error: BaseException, trace: TracebackType | None, *, is_heard: bool) -> None:
    """Write the file from which torchrun reports why a rank failed, unless torch's `record` has written it.

    Args:
        error: Why.
        trace: Its traceback.
        is_heard: Whether this rank has only heard of another one's failure.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path or (os.path.exists(path) and os.path.getsize(path)):
        return
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    try:
        raise error  # the handler writes the exception that is being handled
    except BaseException:
        with contextlib.suppress(OSError):  # the disk is full: the others must hear of the error all the same
            ErrorHandler().record_exception(error)
            if is_heard:
                _date_later(path)
    finally:
        error.__traceback__ = trace


def _date_later(path: str) -> None:
    """Let an error be no root cause: torchrun takes the earliest one for that, by whole seconds, and a process that was
    killed has failed when torchrun sees it, which may be after the others have heard of it.
    """
    with open(path) as file:
        document = json.load(file)
    known = document["message"]["extraInfo"]
    known["timestamp"] = str(int(known["timestamp"]) + _HEARD_LATER_S)
    with open(path, "w") as file:
        json.dump(document, file)


def _exit_as_failed() -> None:
    """Runs after all that the program wants done at its end, for it was registered before."""
    if _exit_codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_codes[0])


atexit.register(_exit_as_failed)

"""Stops a run on fakes before it does what nothing could undo.

    print("forward")    open("log.txt", "a")    STEP.set(3)

A run on fakes is one run too many: the call itself comes later. What it does to Python's objects is undone; a line on
the console, a file, and a context variable are outside of these. A module that is about to do so is called part by part
instead: each rank then runs its code, as often as one process would.
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import functools
import gc
import io
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from farspan.call.leaf import TraceError
from farspan.errors import FarspanError

__all__ = ["nothing_written", "rehearsed", "sets_no_variable"]

_WRITES = frozenset("wax+")
_NOBODYS = (contextvars.Context, contextvars.Token, types.FrameType)
_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {"torch", "sympy", "mpmath", "numpy"}
_lock = threading.Lock()
_thread = threading.local()
_put_back: list[Callable[[], None]] = []
"""Undoes `_watch_console_and_files`, where a rehearsal of any thread runs."""
_num_running = 0


def rehearsed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`, whose Python runs once more later.

    Raises:
        TraceError: It was about to leave a trace.
    """
    context = contextvars.copy_context()
    before = dict(context)
    try:
        with nothing_written() as stopped:
            result = context.run(function, *args, **kwargs)
    except FarspanError:
        raise
    except Exception:
        _check_context(context, before)  # where no run on fakes comes to the end, a real one will
        raise
    if stopped:  # and its own code has caught the error
        raise stopped[0]
    _check_context(context, before)
    return result


@contextlib.contextmanager
def sets_no_variable() -> Iterator[None]:
    """Call in the body what is run once where one process would run it twice.

    Raises:
        TraceError: It sets a context variable.
    """
    before = dict(contextvars.copy_context())
    yield
    _check_context(contextvars.copy_context(), before)


def _check_context(context: contextvars.Context, before: dict[contextvars.ContextVar[Any], Any]) -> None:
    for variable, value in context.items():
        if before.get(variable, context) is not value and _is_of_program(variable):
            raise TraceError(f"it sets the context variable {variable.name}")


@functools.cache
def _is_of_program(variable: contextvars.ContextVar[Any]) -> bool:
    """Returns whether a file, or an object of a class, that is neither Python's own nor torch's holds a variable. The
    variables of torch's settings, and of the packages that torch computes sizes with, change when and as they like.
    """
    holders = [item for item in gc.get_referrers(variable) if not isinstance(item, _NOBODYS)]
    names = [item.get("__name__", "") if type(item) is dict else type(item).__module__ for item in holders]
    return any(str(name).partition(".")[0] not in _LIBRARIES for name in names if name)


@contextlib.contextmanager
def nothing_written() -> Iterator[list[TraceError]]:
    """In the body nothing is written to the console or into files by this thread; yields the errors that stopped it."""
    global _num_running
    stopped: list[TraceError] = []
    with _lock:
        _num_running += 1
        if _num_running == 1:
            _watch_console_and_files()
    outer, _thread.stopped = getattr(_thread, "stopped", None), stopped
    try:
        yield stopped
    finally:
        _thread.stopped = outer
        with _lock:
            _num_running -= 1
            while not _num_running and _put_back:
                _put_back.pop()()


def _stop(what: str) -> None:
    """Raise if this thread rehearses."""
    stopped: list[TraceError] | None = getattr(_thread, "stopped", None)
    if stopped is not None:
        stopped.append(TraceError(what))
        raise stopped[-1]


def _watch_console_and_files() -> None:
    _replace(sys, "stdout", _Console(sys.stdout))
    _replace(sys, "stderr", _Errors(sys.stderr))
    for module in (builtins, io):
        _replace(module, "open", _opening(module.open))


def _replace(owner: Any, name: str, now: Any) -> None:
    before = getattr(owner, name)
    setattr(owner, name, now)

    def put_back() -> None:
        if getattr(owner, name) is now:  # else the program has set another one
            setattr(owner, name, before)

    _put_back.append(put_back)


def _opening(before: Callable[..., Any]) -> Callable[..., Any]:
    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not _WRITES.isdisjoint(mode):
            _stop("it writes into a file")
        return before(file, mode, *args, **kwargs)

    return opened


class _Console:
    """Standard output, while a thread rehearses: the others write as before."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        _stop("it prints")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Errors(_Console):
    """Standard error: Python's warnings and logs go there too, which many models give, and which decide nothing."""

    def write(self, text: str) -> int:
        if sys._getframe(1).f_globals.get("__name__") in ("warnings", "logging"):
            return self._stream.write(text)
        return super().write(text)

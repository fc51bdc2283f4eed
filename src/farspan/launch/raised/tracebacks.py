"""Tracebacks as the user reads them: the program's frames and torch's, without farspan's between them.

    train.py      loss = criterion(model(x), y)
    farspan       _call_module, call_leaf, record ...     cut, and what of torch runs only because farspan does
    model.py      return self.head(x[:, :32])
    linear.py     return F.linear(input, self.weight, self.bias)

An error that farspan itself has made (a bug) keeps its frames. FARSPAN_TRACEBACK=full keeps all of them.
"""

from __future__ import annotations

import dataclasses
import linecache
import os
import threading
import traceback
from types import FrameType, TracebackType

from farspan import settings
from farspan.errors import FarspanError

__all__ = ["NOTE", "cut_frames", "format_error", "format_stack"]

NOTE = "farspan: raised "
"""The beginning of the note that names the module and the line of the user's code that has raised an exception."""
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_MACHINERY = (
    "/contextlib.py",
    "/torch/_compile.py",
    "/torch/_decomp/",
    "/torch/_dynamo/",
    "/torch/_library/",
    "/torch/_meta_registrations.py",
    "/torch/_ops.py",
    "/torch/_prims",
    "/torch/_refs/",
    "/torch/_subclasses/",
    "/torch/overrides.py",
    "/torch/utils/_device.py",
)
"""Files whose frames stand below farspan's only because of it: the plain program is in C++ there, or has none."""
_BELOW = (*_MACHINERY, threading.__file__)
_FILES = os.path.join(_OWN, "launch", "files") + os.sep
"""Stands in for functions of `os` and `open`: what the system says of a file is said there."""
_CALLS_THE_USERS = ("(*args, **kwargs)", "(*given, **kwargs)")
_SAYS_TORCHS_WORDS = ("self.read()", "self._data()", "# torch's words")
"""In lines that do to a plain tensor what the program does to a recorded one: torch says what is wrong with it."""


def cut_frames(error: BaseException) -> None:
    """Takes farspan's frames out of the traceback of an exception, and of those that it came from.

    Their frames are let go, and what they hold with them.
    """
    if not _is_full():
        for each in _chain(error):
            if not _is_own_mistake(each):
                each.__traceback__ = _cut(each.__traceback__)


def format_error(error: BaseException) -> str:
    """Returns the traceback as the user reads it; the exception keeps its frames."""
    chain = _chain(error)
    kept = [each.__traceback__ for each in chain]
    try:
        cut_frames(error)
        return "".join(traceback.format_exception(error))
    finally:
        for each, trace in zip(chain, kept, strict=True):
            each.__traceback__ = trace


def format_stack(frame: FrameType, most: int) -> str:
    """Returns where a thread is, outermost call first, as the user reads it: at most so many frames, the innermost."""
    frames = [*traceback.walk_stack(frame)][::-1]
    if not _is_full():
        kept: list[tuple[FrameType, int]] = []
        is_below_own = False
        for each in frames:
            is_own = _is_own(each[0])
            is_below_own = is_below_own or is_own
            if not is_own and not (is_below_own and any(part in each[0].f_code.co_filename for part in _BELOW)):
                kept.append(each)
        frames = kept or frames
    return "".join(traceback.StackSummary.extract(iter(frames[-most:])).format())


def _is_full() -> bool:
    return settings.text("TRACEBACK") == "full"  # another word is refused at the start, and must not hide an error here


def _chain(error: BaseException) -> list[BaseException]:
    """Returns the exception, and all that it came from or holds, each once."""
    found: dict[int, BaseException] = {}
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            todo += [each.__cause__, each.__context__]
            parts: tuple[BaseException, ...] = getattr(each, "exceptions", ())
            todo += parts if isinstance(each, BaseExceptionGroup) else ()
    return [*found.values()]


def _is_own_mistake(error: BaseException) -> bool:
    """Returns whether farspan's own code has failed: not where it says torch's words, or has called what was asked."""
    if isinstance(error, FarspanError) or any(note.startswith(NOTE) for note in getattr(error, "__notes__", ())):
        return False
    if not isinstance(error, Exception):  # Ctrl-C, wherever it comes
        return False
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    name = trace.tb_frame.f_code.co_filename
    if not name.startswith(_OWN):
        return False
    if isinstance(error, (OSError, ValueError)) and name.startswith(_FILES):
        return False
    line = linecache.getline(name, trace.tb_lineno).strip()
    is_meant = line.startswith("raise ") or any(part in line for part in (*_CALLS_THE_USERS, *_SAYS_TORCHS_WORDS))
    return not is_meant or isinstance(error, AssertionError)


def _is_own(frame: FrameType) -> bool:
    """Returns whether a frame is farspan's: of its code, or of a dataclass's own (`__init__` in "<string>")."""
    name = frame.f_code.co_filename
    is_made = name == "<string>" and str(frame.f_globals.get("__name__")).startswith("farspan.")
    return is_made or name.startswith(_OWN)


def _cut(trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback without farspan's frames and what belongs to them; None where there are no others."""
    kept: list[TracebackType] = []
    is_below_own = is_right_below = False
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        is_right_below = _is_own(trace.tb_frame) or (is_right_below and name == dataclasses.__file__)
        if is_right_below:
            is_below_own = True
        elif not (is_below_own and any(part in name for part in _MACHINERY)):
            kept.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for each in reversed(kept):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found

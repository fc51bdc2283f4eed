"""The line of the user's code at which a call has raised an exception, and the module around it, in a note.

It is found where the call runs: at its owner, or on fakes. The note goes with the exception to all ranks, whose
tracebacks end where the call was recorded, and it holds no frame: frames hold what the run has made.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from torch import nn

from farspan.call.draws.frame import name_of_module
from farspan.call.naming import is_users_file
from farspan.launch.raised.tracebacks import NOTE

if TYPE_CHECKING:
    from farspan.graph import Call

__all__ = ["describe", "note_line", "note_line_of_backward", "place_now", "place_of_error"]

_MOST_NAMES = 4
"""Of the modules through which a backward goes."""


def note_line(error: BaseException, call: Call) -> None:
    """Add to an exception where `call`, which has raised it, was at.

    Args:
        error: Its traceback begins in the run.
        call: That ran.
    """
    if _is_noted(error):
        return
    module = getattr(call.target, "module", None)
    outer = str(call.entry.name) if module is None else describe(module)
    inner, line = _innermost(error, outer)
    if not line:
        line = _line_text(call.where)
    within = f"{inner}, called in {outer}," if inner not in ("", outer) else outer
    error.add_note(f"{NOTE}in {within} at {line}")


def note_line_of_backward(error: BaseException, where: Any, part: str, modules: Sequence[str]) -> None:
    """Add to an exception of a backward where in the user's code it was raised, and where that backward was begun.

    Args:
        error: Its traceback begins in the run.
        where: The line of `backward()`.
        part: Which share of it, for people.
        modules: The names of those through which that share goes.
    """
    if _is_noted(error):
        return
    inner, line = _innermost(error, "")
    names = ", ".join([*modules[:_MOST_NAMES], *(["..."] if len(modules) > _MOST_NAMES else [])])
    through = f"the backward through {names}" if names else "the backward"
    begun = f"{through}, begun at {_line_text(where)}" if where is not None else part
    at = f"{f'in {inner} ' if inner else ''}at {line}\n    " if line else ""
    error.add_note(f"{NOTE}{at}in {begun}")


def _is_noted(error: BaseException) -> bool:
    return any(note.startswith(NOTE) for note in getattr(error, "__notes__", ()))


def place_of_error(error: BaseException) -> str:
    """Returns where in a model's code an exception was raised: ", in blocks.1 (Block) at train.py:6, ..."."""
    return _said(*_innermost(error, ""))


def place_now(outermost: CodeType) -> str:
    """Returns where in a model's code this is, as `place_of_error` does.

    Args:
        outermost: The function of ours that has called the model.
    """
    frames: list[tuple[FrameType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _said(*_innermost_of(frames[::-1], ""))


def _said(inner: str, line: str) -> str:
    return f"{inner and f', in {inner}'}{line and (' at ' if inner else ', at ')}{line}"


def _innermost(error: BaseException, outer: str) -> tuple[str, str]:
    """Returns the module in which the user's innermost line is, and the line; "" for what there is not."""
    return _innermost_of([(each, number) for each, number in traceback.walk_tb(error.__traceback__)], outer)


def _innermost_of(frames: Sequence[tuple[FrameType, int]], outer: str) -> tuple[str, str]:
    line, inner, latest = "", "", outer
    for frame, number in frames:
        latest = _module_of(frame) or latest
        if is_users_file(frame.f_code.co_filename):
            line, inner = _line_text((frame.f_code, number)), latest
    return inner or latest, line


def _module_of(frame: FrameType) -> str:
    """Returns the module whose method runs in a frame, where it is part of a distributed model."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":
        return ""
    module = frame.f_locals.get("self")
    return describe(module) if isinstance(module, nn.Module) and name_of_module(module) is not None else ""


def describe(module: nn.Module) -> str:
    """Returns a module's name in its model, and its class."""
    return f"{name_of_module(module) or 'the model'} ({type(module).__name__})"


def _line_text(where: Any) -> str:
    if where is None:
        return "an unknown line"
    code, number = where
    source = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number}, in {code.co_name}{f': {source}' if source else ''}"

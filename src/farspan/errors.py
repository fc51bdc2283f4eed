"""The errors farspan raises: what happened, why (with the user's own names and numbers), what to try.

PlanError: no stage owns the parameter 'head.weight'.
  why  the plan names 'blocks.*' and 'embed' only; 1 of 26 parameters is left over.
  try  add "head": "rank:1" to the plan
"""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = [
    "CheckpointError",
    "DamageError",
    "DeadlineError",
    "DivergenceError",
    "FarspanError",
    "LaunchError",
    "PlanError",
    "RecordError",
    "RemoteError",
    "SanitizeError",
    "ServiceError",
    "naming_keywords",
    "printable",
    "quoted",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_INDENT = "\n       "
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LONGEST_LINE, _KEPT_START, _KEPT_END = 600, 400, 160
_LONGEST_QUOTE = 100

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 2, 3, 3, 3


def printable(text: str) -> str:
    """Returns a text from a file or another process without what would control a terminal; lines and tabs stay.

    >>> printable("a\\x1b[2Jb\\n")
    'a\\\\x1b[2Jb\\n'
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def quoted(value: object) -> str:
    """Returns a value from outside as an error shows it: short, however large it is.

    >>> quoted(["rank:0"] * 9), quoted("a" * 99)[-10:]
    ("['rank:0', 'rank:0', 'rank:0', ...]", "aaaaaaaaa'")
    """
    text = _SHORT.repr(value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."


class FarspanError(Exception):
    """Base of all errors of farspan.

    Args:
        what: One line: what happened.
        why: Why, with the user's own names and numbers with units; may have several lines.
        hint: What to try, pasteable where possible; may have several lines.
    """

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        self.what = what
        self.why = why
        self.hint = hint
        super().__init__(what, why, hint)

    def __str__(self) -> str:
        text = self.what
        for label, part in (("why", self.why), ("try", self.hint)):
            if part:
                text += f"\n  {label}  " + part.replace("\n", _INDENT)
        return printable("\n".join(map(_shortened, text.split("\n"))))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.why, self.hint))


def _shortened(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_KEPT_START]} ... {line[-_KEPT_END:]}"


def _rebuild(kind: type[FarspanError], what: str, why: str, hint: str) -> FarspanError:
    return kind(what, why=why, hint=hint)


class PlanError(FarspanError):
    """A plan that cannot be: unknown names, ranks that do not exist, parameters nobody owns."""


class RecordError(FarspanError):
    """An operation that cannot be recorded, or whose recorded prediction turned out wrong."""


class DivergenceError(FarspanError):
    """The ranks' programs differ: another call, another order, another branch."""


class RemoteError(FarspanError):
    """Another rank failed; `remote_traceback` holds that rank's own traceback ("" if it left none).

    `is_loss` is True if its process or its host is gone, False if its program raised.
    """

    remote_traceback: str = ""
    rank: int = -1
    is_loss: bool = False


class ServiceError(FarspanError):
    """A call of another process's object has failed, or cannot be made.

    `remote_type` is the name of the class of exception that the method has raised, "" if it has raised none, and
    `remote_traceback` its traceback. `is_loss` is True if the process is gone: it may have run the call or not.
    """

    remote_type: str = ""
    remote_traceback: str = ""
    is_loss: bool = False


class DeadlineError(FarspanError):
    """A wait took longer than its deadline: who waited for what, from whom, at which task."""


class SanitizeError(FarspanError):
    """FARSPAN_SANITIZE has found what must not be: released memory that is used, a value that has changed, a
    prediction that a call has not kept."""


class CheckpointError(FarspanError):
    """A checkpoint that cannot be written, or that is damaged: which file of it, which tensor."""


class DamageError(CheckpointError):
    """Bytes of a checkpoint are not those that were written, or are not there."""


class LaunchError(FarspanError):
    """The processes could not be started, or could not find each other."""


def naming_keywords(function: _Function) -> _Function:
    """Lets a function name the nearest of its keywords where it is given one that it does not have.

    >>> @naming_keywords
    ... def cut(*, micro_batches=1): ...
    >>> cut(microbatches=4)
    Traceback (most recent call last):
    TypeError: cut() has no keyword microbatches: did you mean micro_batches?
    """
    import inspect

    known = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not known >= kwargs.keys():
            unknown = next(name for name in kwargs if name not in known)
            raise TypeError(f"{function.__name__}() has no keyword {unknown}: {_advice(unknown, [*known])}")
        return function(*args, **kwargs)

    return cast("_Function", call)


def _advice(unknown: str, known: list[str]) -> str:
    import difflib  # only where it is of use

    near = difflib.get_close_matches(unknown[:100], known, n=1)
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"

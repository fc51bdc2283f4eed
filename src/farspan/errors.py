"""The errors farspan raises: what happened, why (with the user's own names and numbers), what to try.

PlanError: no stage owns the parameter 'head.weight'.
  why  the plan names 'blocks.*' and 'embed' only; 1 of 26 parameters is left over.
  try  add "head": "rank:1" to the plan
"""

from __future__ import annotations

import re

__all__ = [
    "DeadlineError",
    "DivergenceError",
    "FarspanError",
    "LaunchError",
    "PlanError",
    "RecordError",
    "RemoteError",
    "printable",
]

_INDENT = "\n       "
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """A text from a file or another process without what would control a terminal; lines and tabs stay.

    >>> printable("a\\x1b[2Jb\\n")
    'a\\\\x1b[2Jb\\n'
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


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
        return printable(text)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.why, self.hint))


def _rebuild(kind: type[FarspanError], what: str, why: str, hint: str) -> FarspanError:
    return kind(what, why=why, hint=hint)


class PlanError(FarspanError):
    """A plan that cannot be: unknown names, ranks that do not exist, parameters nobody owns."""


class RecordError(FarspanError):
    """An operation that cannot be recorded, or whose recorded prediction turned out wrong."""


class DivergenceError(FarspanError):
    """The ranks' programs differ: another call, another order, another branch."""


class RemoteError(FarspanError):
    """Another rank failed; `remote_traceback` holds that rank's own traceback ("" if it left none)."""

    remote_traceback: str = ""
    rank: int = -1


class DeadlineError(FarspanError):
    """A wait took longer than its deadline: who waited for what, from whom, at which task."""


class LaunchError(FarspanError):
    """The processes could not be started, or could not find each other."""

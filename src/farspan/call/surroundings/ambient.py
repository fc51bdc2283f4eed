"""What code reads of its thread by name, and of its functions: context variables, defaults.

Each is a table of names, as the globals of a file are, so that what the program sets between calls can be seen and, for
calls that run later, be put back.
"""

from __future__ import annotations

import abc
import contextvars
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from farspan.call.surroundings.code import ABSENT, globals_of
from farspan.errors import RecordError

__all__ = ["Ambient", "ambient_of"]


class Ambient(abc.ABC):
    """A table of names that is not a dictionary."""

    item_of: Callable[[str], Any]
    """Returns what a name means now; `ABSENT` where it means nothing."""

    @abc.abstractmethod
    def put(self, name: str, item: Any) -> None:
        """Let a name mean what it meant."""


class _Context(Ambient):
    """One context variable of this thread."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self._variable = variable

    def item_of(self, name: str) -> Any:
        try:
            return self._variable.get()
        except LookupError:
            return ABSENT

    def put(self, name: str, item: Any) -> None:
        if item is ABSENT:
            raise RecordError(
                f"the context variable {name} had no value when a module was called that runs only now, and has one.",
                why="a value of a context variable cannot be taken away again.",
                hint=f'contextvars.ContextVar("{name}", default=None), or call farspan.flush() before it is set',
            )
        self._variable.set(item)


class _Defaults(Ambient):
    """Those of a function's arguments: most functions have some, and they are looked at often."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function
        self.item_of = functools.partial(getattr, function)

    def put(self, name: str, item: Any) -> None:
        setattr(self._function, name, item)


_context = functools.lru_cache(maxsize=1024)(_Context)


def ambient_of(function: types.FunctionType) -> Iterator[tuple[Ambient, str]]:
    """Yields what the code of a function may read so. Not environment variables, which differ from rank to rank."""
    for _, item in globals_of(function):
        if isinstance(item, contextvars.ContextVar):
            yield _context(item), item.name
    for name in ("__defaults__", "__kwdefaults__"):
        if getattr(function, name):
            yield _Defaults(function), name

"""What a module's code can change beside the module: globals that it names, variables around its functions, its class.

A run on fakes must leave no trace there. And as only one rank runs a module for real, the others would not see what it
changes: such a module is called part by part instead, on every rank.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from farspan.lazy.leaf import LeakError
from farspan.lazy.metadata.effects.reachable import State, is_same

__all__ = ["AroundError", "code_of", "content_of", "globals_of", "nothing_changed_around"]

_ABSENT = object()
_ENDS = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, property, staticmethod, classmethod)


class AroundError(LeakError):
    """Something around the code of a module has changed while it ran: by the module, or by another thread."""


@contextlib.contextmanager
def nothing_changed_around(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put back what the body changes around the code of `modules`.

    Raises:
        AroundError: Something has changed.
    """
    classes, functions = code_of(modules)
    before: list[tuple[Any, str, Any]] = [
        (cls, name, item) for cls in classes for name, item in vars(cls).items() if _can_change(name, item)
    ]
    before += [(function.__globals__, name, item) for function in functions for name, item in globals_of(function)]
    before += [(cell, "", content_of(cell)) for function in functions for cell in function.__closure__ or ()]
    state = State(item for _, _, item in before)
    names: list[str] = []
    try:
        yield
    finally:
        names = _undo(before, state)
    if names:
        raise AroundError(f"it changes {' and '.join(dict.fromkeys(names))} outside the module")


def _undo(before: Sequence[tuple[Any, str, Any]], state: State) -> list[str]:
    """Put back what has changed; the names of it."""
    changed = [(place, name, item) for place, name, item in before if not is_same(_now(place, name), item)]
    for place, name, item in changed:
        _put_back(place, name, item)
    inside = state.changed()
    state.put_back(inside)
    names = [name for _, name, item in before if state.reaches(item, inside)] + [name for _, name, _ in changed]
    return [name or "a variable of a function around it" for name in names]


def code_of(modules: Sequence[nn.Module]) -> tuple[list[type], list[types.FunctionType]]:
    """The classes of `modules` that are not torch's, and the functions of their files that they can call."""
    classes = {cls: None for module in modules for cls in type(module).__mro__ if not _is_library(cls)}
    functions = {item: None for cls in classes for item in vars(cls).values() if isinstance(item, types.FunctionType)}
    functions.update((item, None) for module in modules for item in vars(module).values() if _is_function(item))
    stack = list(functions)
    while stack:
        function = stack.pop()
        near = [item for _, item in globals_of(function)]
        near += [content_of(cell) for cell in function.__closure__ or ()]
        for item in near:
            if _is_function(item) and item.__module__ == function.__module__ and item not in functions:
                functions[item] = None
                stack.append(item)
    return list(classes), list(functions)


def _is_library(cls: type) -> bool:
    return cls is object or cls.__module__.startswith(("torch.", "typing", "abc"))


def _is_function(item: Any) -> bool:
    return isinstance(item, types.FunctionType)


def _can_change(name: str, item: Any) -> bool:
    return not (name.startswith("__") and name.endswith("__")) and not isinstance(item, _ENDS)


def globals_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The global variables that a function's code names, with those of the functions inside it."""
    names: dict[str, None] = {}
    stack = [function.__code__]
    while stack:
        code = stack.pop()
        names.update(dict.fromkeys(code.co_names))
        stack += [item for item in code.co_consts if isinstance(item, types.CodeType)]
    table = function.__globals__
    return [(name, table[name]) for name in names if name in table and not isinstance(table[name], types.ModuleType)]


def content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return _ABSENT


def _now(place: Any, name: str) -> Any:
    if isinstance(place, types.CellType):
        return content_of(place)
    return (place if isinstance(place, dict) else vars(place)).get(name, _ABSENT)


def _put_back(place: Any, name: str, item: Any) -> None:
    if isinstance(place, types.CellType):
        if item is _ABSENT:
            del place.cell_contents
        else:
            place.cell_contents = item
    elif isinstance(place, dict):
        place[name] = item
    else:
        setattr(place, name, item)

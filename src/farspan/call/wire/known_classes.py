"""A table of what may be rebuilt of what another rank names: this rank's own, never a search of what is loaded.

    fixed     what Python, torch and numpy keep data in                  list, OrderedDict, torch.return_types.max
    used      classes of which this rank has had an object in its hands  noted by the Flattener
    named     classes that this rank's own code names                    the program's; or that of the very call

Nothing that is found here is ever called to rebuild an object (see `metadata/template.py`).
"""

from __future__ import annotations

import abc
import builtins
import collections
import enum
import functools
import inspect
import pathlib
import sys
import types
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from farspan.call.pytree.construction import used_kinds
from farspan.call.surroundings.code import content_of, globals_of
from farspan.torch_private import ADAPTIVE_RESULT

__all__ = ["FACTORIES", "Known", "in_modules", "is_fixed", "name_of", "of_program"]

FACTORIES = frozenset(
    {
        bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple, collections.Counter,
        collections.OrderedDict, collections.deque,
    }
)  # fmt: skip
"""Factories that a default dictionary may call, whoever sends it."""

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_LIBRARIES = (
    "torch",
    "numpy",
    "farspan",
    "typing",
    "abc",
    "builtins",
    "collections",
    "functools",
    "enum",
    "dataclasses",
)
_MOST_VISITED = 200_000
_MOST_FRAMES = 12


class Known:
    """The names that one text from another rank may hold.

    Args:
        call: What the call at hand is made of, on this rank: its modules, or its function. What their code names,
            functions too, may come back from it.
    """

    def __init__(self, call: Iterable[Any] = ()) -> None:
        self._call = [*call]

    def find(self, name: str) -> Any:
        """Returns the class, or the function of the call, of that name; None if this rank has none."""
        found = _fixed().get(name) or _used().get(name)
        if found is not None:
            return found
        found = _search(self._call, name, (type, *_FUNCTIONS, types.ModuleType))
        if found is None:
            found = _search(of_program(), name, (type,))
        return found

    def may_make(self, factory: Any) -> bool:
        """Returns whether a default dictionary from another rank may have `factory`: it calls it for each missing
        key."""
        if factory is None or (isinstance(factory, type) and factory in FACTORIES):
            return True
        name = name_of(factory)
        return name is not None and _search(self._call, name, (type, *_FUNCTIONS)) is factory


def name_of(item: Any) -> str | None:
    """Returns how ranks name a class, function or module; None for what has no name."""
    if isinstance(item, types.ModuleType):
        return f"{item.__name__}:"
    module, path = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    return f"{module}:{path}" if isinstance(module, str) and isinstance(path, str) else None


def is_fixed(name: str) -> bool:
    """Returns whether every rank has what is named, whatever its program."""
    return name in _fixed()


@functools.cache
def _fixed() -> dict[str, type]:
    kinds: list[Any] = [*vars(builtins).values(), *vars(torch.return_types).values(), *vars(np).values()]
    kinds += [collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter]
    kinds += [collections.UserDict, collections.UserList, types.SimpleNamespace, functools.partial, uuid.UUID]
    kinds += [pathlib.PurePath, pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.Path, pathlib.PosixPath]
    kinds += [torch.Tensor, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator]
    kinds += [
        abc.ABCMeta,
        enum.EnumMeta,
        type(torch.Tensor),
        torch.SymInt,
        nn.Parameter,
        nn.Module,
        nn.utils.rnn.PackedSequence,
        ADAPTIVE_RESULT,
    ]
    return {f"{kind.__module__}:{kind.__qualname__}": kind for kind in kinds if isinstance(kind, type)}


def _used() -> dict[str | None, type]:
    return {name_of(kind): kind for kind in used_kinds()}


def of_program() -> Iterator[Any]:
    """Returns what the running program's code names, as far as its globals and the frames on the stack show."""
    main = sys.modules.get("__main__")
    rooms = [] if main is None else [vars(main)]
    frame = inspect.currentframe()
    frames: list[types.FrameType] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        if not str(frame.f_globals.get("__name__", "")).startswith("farspan."):
            frames.append(frame)
        frame = frame.f_back
    rooms += [item.f_globals for item in frames]
    for item in frames:
        yield from list(item.f_locals.values())
        yield from _named_in(item.f_code, item.f_globals)
    for room in {id(room): room for room in rooms}.values():
        yield from list(room.values())


def in_modules(function: types.FunctionType) -> list[Any]:
    """Returns what a function's code names in Python modules that it names: `errors.TooLarge`."""
    return _named_in(function.__code__, function.__globals__)


def _named_in(code: types.CodeType, table: dict[str, Any]) -> list[Any]:
    rooms = [item for name in code.co_names if isinstance(item := table.get(name), types.ModuleType)]
    return [vars(room)[name] for room in rooms for name in code.co_names if name in vars(room)]


def _search(start: Iterable[Any], name: str, kinds: tuple[type, ...]) -> Any:
    """Returns the first object of `kinds` that is called `name`, of what `start` and the code behind it names.

    The code of torch, numpy and Python itself is not followed. Ends when some 200,000 objects have been seen.
    """
    queue = deque(start)
    seen: set[int] = set()
    held: list[Any] = []  # so that an id stays its own
    while queue and len(seen) < _MOST_VISITED:
        item = queue.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        held.append(item)
        if isinstance(item, kinds) and name_of(item) == name:
            return item
        queue.extend(_behind(item))
    return None


def _behind(item: Any) -> list[Any]:
    """Returns the classes and functions to search next: those that the code of `item`, or of its class, refers to by
    name."""
    if isinstance(item, (staticmethod, classmethod)):
        return [item.__func__]
    if isinstance(item, property):
        return [function for function in (item.fget, item.fset) if function is not None]
    if isinstance(item, types.MethodType):
        return [item.__func__, type(item.__self__)]
    if isinstance(item, types.FunctionType):
        if _is_library(item.__module__):
            return []
        cells = [content_of(cell) for cell in item.__closure__ or ()]
        wrapped = [vars(item)["__wrapped__"]] if "__wrapped__" in vars(item) else []
        return [*(found for _, found in globals_of(item)), *in_modules(item), *cells, *wrapped]
    if isinstance(item, type):
        return [] if _is_library(item.__module__) else [type(item), *item.__mro__[1:], *_parts_of(item)]
    if isinstance(item, types.ModuleType):
        return []
    inside = list(vars(item).values()) if isinstance(item, nn.Module) else []
    return [type(item), *(part for part in inside if isinstance(part, (type, *_FUNCTIONS)))]


def _parts_of(cls: type) -> list[Any]:
    kinds = (type, *_FUNCTIONS, staticmethod, classmethod, property)
    return [part for part in vars(cls).values() if isinstance(part, kinds)]


def _is_library(module: Any) -> bool:
    return not isinstance(module, str) or module.partition(".")[0] in _LIBRARIES

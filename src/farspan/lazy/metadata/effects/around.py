"""What the code of modules reads, and can change, beside them: globals, variables around functions, classes.

A run on fakes must leave no trace there. And as only one rank runs a module for real, the others would not see what it
changes: such a module is called part by part instead, on every rank.

What the program changes there between calls, they must see as it was when they were recorded, though they run later:

    RATE = 0.1    model(x) is recorded    RATE = 0.2    opt.step(): model runs, and sees 0.1
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any

import numpy as np
from torch import nn

from farspan.lazy.leaf import LeakError
from farspan.lazy.metadata.canonical import canonical, is_plain
from farspan.lazy.metadata.effects.code import (
    ABSENT,
    Code,
    code_of,
    code_of_kinds,
    content_of,
    functions_in,
    globals_of,
    module_attributes_of,
    names_in,
    texts_in,
)
from farspan.lazy.metadata.effects.reachable import State, is_same, is_small
from farspan.lazy.metadata.template import ById, slots_of

__all__ = ["AroundError", "Surroundings", "nothing_changed_around"]

_Place = tuple[Any, str]
"""A class, the dictionary of a file, or a cell, and the name there ("" in a cell)."""
_ENDS = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, property, staticmethod, classmethod)
_READ_ALL = frozenset({"vars", "__dict__", "asdict", "astuple"})
"""Code that uses one of these may read attributes that it does not name."""
_MOST_OBJECTS, _MOST_ELEMENTS = 100, 1000
_MOST_KNOWN = 64


class AroundError(LeakError):
    """Something around the code of a module has changed while it ran: by the module, or by another thread."""


@contextlib.contextmanager
def nothing_changed_around(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put back what the body changes around the code of `modules`.

    Raises:
        AroundError: Something has changed.
    """
    places = [(place, name, _now(place, name)) for place, name in _places_of(code_of(modules))]
    before = [(place, name, item) for place, name, item in places if not isinstance(item, _ENDS)]
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
        _put(place, name, item)
    inside = state.changed()
    state.put_back(inside)
    names = [name for _, name, item in before if state.reaches(item, inside)] + [name for _, name, _ in changed]
    return [name or "a variable of a function around it" for name in names]


class Surroundings:
    """What is around the code of some modules, as it was when they were called last.

    Args:
        kinds: The classes of the modules, or that of an autograd function.
        own: Functions that the modules hold themselves.
    """

    def __init__(self, kinds: Iterable[type], own: Iterable[types.FunctionType] = ()) -> None:
        self._kinds, self._own = tuple(kinds), tuple(own)
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._num_looks = 0
        self.number = 0
        """What predictions depend on: the same where all is as it was some time before."""
        self.look()

    def __str__(self) -> str:
        return self._kinds[0].__name__

    def look(self) -> None:
        """See all as it is now."""
        code = code_of_kinds(self._kinds, self._own)
        places = _places_of(code)
        self._cells = [place for place, _ in places if isinstance(place, types.CellType)]
        tables: dict[int, tuple[Any, dict[str, None]]] = {}
        for place, name in places:
            if name:
                tables.setdefault(id(place), (place, {}))[1][name] = None
        self._tables = [(place, _table(place), _getter(names), [*names]) for place, names in tables.values()]
        self._state = State((_now(*place) for place in places), most_objects=_MOST_OBJECTS)
        self._objects = [(item, _named_in(item, code)) for item in self._state.objects if _can_be_looked_at(item)]
        self._arrays = [item for item in self._state.objects if isinstance(item, np.ndarray) and is_small(item)]
        self.memory = self._state.memory
        """Of the plain tensors."""
        self._latest = self._look()
        signature = tuple(canonical(item) if is_plain(item) else ById(item) for item in self._latest)
        self._num_looks += 1
        self.number = self._numbers.setdefault(signature, self._num_looks)
        if len(self._numbers) > _MOST_KNOWN:
            del self._numbers[next(iter(self._numbers))]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that could change."""
        return not self._latest

    def has_changed(self) -> bool:
        """Whether there is a difference to when `look` was called."""
        latest = self._latest
        if not latest:
            return False
        try:
            now = self._look()
        except KeyError:  # a variable is gone
            return True
        if len(now) != len(latest):
            return True
        if all(map(is_, now, latest)):
            return False
        if all(map(is_same, now, latest)):
            self._latest = now
            return False
        return True

    def put_back(self) -> Callable[[], None]:
        """Let all be as it was at `look`; give what puts back what is now."""
        meanwhile = State(self._state.objects, most_objects=_MOST_OBJECTS)
        changed: list[tuple[Any, str, Any]] = []
        latest = iter(self._latest)
        for place, _, _, names in self._tables:
            changed += [(place, name, next(latest)) for name in names]
        changed += [(cell, "", next(latest)) for cell in self._cells]
        now = [(place, name, _now(place, name)) for place, name, then in changed if _now(place, name) is not then]
        for place, name, then in changed:
            if _now(place, name) is not then:
                _put(place, name, then)
        inside = self._state.changed()
        self._state.put_back(inside)

        def restore() -> None:
            meanwhile.put_back(inside)
            for place, name, item in now:
                _put(place, name, item)

        return restore

    def _look(self) -> list[Any]:
        found: list[Any] = []
        for _, table, getter, _ in self._tables:
            found += getter(table)
        if self._cells:
            found += map(content_of, self._cells)
        for item, names in self._objects:
            attributes = getattr(item, "__dict__", None)
            if attributes is not None:
                found += attributes.values() if names is None else map(attributes.get, names)
                found.append(len(attributes))
            if isinstance(item, (dict, list, deque, set)):
                found.append(len(item))
                if len(item) <= _MOST_ELEMENTS:
                    found += item.values() if isinstance(item, dict) else item
            for cls in type(item).__mro__[:-1]:
                if "__slots__" in cls.__dict__:
                    found += [getattr(item, name, None) for name in slots_of(cls)]
        found += [item.tobytes() for item in self._arrays]
        return found


def _places_of(code: Code) -> list[_Place]:
    """Where what is around some code can be bound again."""
    classes, functions = code
    places: list[_Place] = []
    for cls in classes:
        places += [(cls, name) for name in vars(cls) if not (name.startswith("__") and name.endswith("__"))]
    seen: dict[tuple[int, str], _Place] = {}
    for function in functions:
        table = function.__globals__
        near: list[_Place] = [(table, name) for name, _ in globals_of(function)]
        near += [(vars(module), name) for module, name in module_attributes_of(function)]
        near += [(cell, "") for cell in function.__closure__ or ()]
        seen.update(((id(place), name), (place, name)) for place, name in near)
    return [*places, *seen.values()]


def _named_in(item: Any, code: Code) -> list[str] | None:
    """The attributes of an object that some code, or the object's own methods, can read by name; None for all."""
    functions = [*code[1], *(function for cls in type(item).__mro__[:-1] for function in functions_in(cls))]
    names = {name for function in functions for name in names_in(function)}
    if names & _READ_ALL:
        return None
    names.update(text for function in functions for text in texts_in(function))
    return [name for name in getattr(item, "__dict__", {}) if name in names]


def _can_be_looked_at(item: Any) -> bool:
    return isinstance(item, (dict, list, deque, set)) or hasattr(item, "__dict__") or hasattr(type(item), "__slots__")


def _table(place: Any) -> Mapping[str, Any]:
    return vars(place) if isinstance(place, type) else place


def _getter(names: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    keys = [*names]
    return itemgetter(*keys) if len(keys) > 1 else lambda table, key=keys[0]: (table[key],)


def _now(place: Any, name: str) -> Any:
    if isinstance(place, types.CellType):
        return content_of(place)
    return _table(place).get(name, ABSENT)


def _put(place: Any, name: str, item: Any) -> None:
    """Bind a variable to what it held."""
    if isinstance(place, types.CellType):
        if item is ABSENT:
            del place.cell_contents
        else:
            place.cell_contents = item
    elif isinstance(place, dict):
        if item is ABSENT:
            place.pop(name, None)
        else:
            place[name] = item
    elif item is ABSENT:
        delattr(place, name)
    else:
        setattr(place, name, item)

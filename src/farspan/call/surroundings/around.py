"""Follows what the code of modules reads, and can change, beside them: globals, variables around functions, classes.

A run on fakes must leave no trace there. And as only one rank runs a module for real, the others would not see what it
changes: such a module is called part by part instead, on every rank.

What the program changes there between calls, they must see as it was when they were recorded, though they run later:

    RATE = 0.1    model(x) is recorded    RATE = 0.2    opt.step(): model runs, and sees 0.1
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from farspan.call.leaf import TraceError
from farspan.call.pytree.by_id import ById
from farspan.call.pytree.canonical import canonical, is_plain
from farspan.call.side_effects.hidden import copies_of_hidden, hidden_in
from farspan.call.side_effects.reachable import Glance, Names, State, are_same, is_same
from farspan.call.surroundings.ambient import Ambient, ambient_of
from farspan.call.surroundings.code import (
    ABSENT,
    Code,
    code_of,
    code_of_kinds,
    content_of,
    globals_of,
    imported_by,
    matches_by_position,
    module_attributes_of,
    names_in,
    names_read,
    texts_in,
)
from farspan.errors import FarspanError

__all__ = ["AroundError", "Surroundings", "nothing_changed_around"]

_Place = tuple[Any, str]
"""A class, the dictionary of a file, another table of names, or a cell, and the name there ("" in a cell)."""
_ENDS = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, property, staticmethod, classmethod)
_READ_ALL = frozenset({"vars", "__dict__", "asdict", "astuple", "fields", "deepcopy"})
"""Code that names one of these may read attributes that it does not name."""
_READERS = (copy.copy, dataclasses.replace)
"""The same of functions, whose names alone say too little."""
_GETTERS = (operator.attrgetter, operator.methodcaller)
_MOST_OBJECTS, _MOST_MODULES = 100, 20
_MOST_KNOWN = 64
_in_cell = operator.attrgetter("cell_contents")


class AroundError(TraceError):
    """Something around the code of a module has changed while it ran: by the module, or by another thread."""


@contextlib.contextmanager
def nothing_changed_around(modules: Sequence[nn.Module], *, must_copy: bool = True) -> Iterator[None]:
    """Put back what the body changes around the code of `modules`.

    Args:
        modules: Whose code runs in the body.
        must_copy: Whether the body must not move on objects whose state cannot be looked into.

    Raises:
        AroundError: Something has changed, by then too if the body has raised another exception than farspan's own.
        LeakError: An object whose state cannot be looked into (a generator of `random`) has been moved on.
    """
    places = [(place, name, _now(place, name)) for place, name in _places_of(code_of(modules))]
    before = [(place, name, item) for place, name, item in places if not isinstance(item, _ENDS)]
    state = State(item for _, _, item in before)
    try:
        with copies_of_hidden(hidden_in([_Variables(before)], state.holders, must_copy=must_copy)):
            yield
    except BaseException as error:
        names = _undo(before, state)
        if not names or isinstance(error, FarspanError) or not isinstance(error, Exception):
            raise
    else:
        names = _undo(before, state)
    if names:
        raise AroundError(f"it changes {' and '.join(dict.fromkeys(names))} outside the module")


class _Variables(MutableMapping[int, Any]):
    """The objects bound at some places, by the places' numbers."""

    def __init__(self, places: Sequence[tuple[Any, str, Any]]) -> None:
        self._places = places

    def __getitem__(self, number: int) -> Any:
        return _now(*self._places[number][:2])

    def __setitem__(self, number: int, item: Any) -> None:
        _put(*self._places[number][:2], item)

    def __delitem__(self, number: int) -> None:
        _put(*self._places[number][:2], ABSENT)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._places)))

    def __len__(self) -> int:
        return len(self._places)


def _undo(before: Sequence[tuple[Any, str, Any]], state: State) -> list[str]:
    """Put back what has changed; the names of it."""
    changed = [(place, name, item) for place, name, item in before if not is_same(_now(place, name), item)]
    for place, name, item in changed:
        _put(place, name, item)
    inside = state.changed()
    state.put_back(inside)
    names = [name for _, name, item in before if state.reaches(item, inside)] + [name for _, name, _ in changed]
    return [name or "a variable of a function around it" for name in names]


class Snapshot:
    """The surroundings of some code at one moment.

    Attributes:
        number: What predictions depend on: the same where all is as it was at another moment.
        memory: Of the plain tensors there.
    """

    __slots__ = (
        "_cells",
        "_classes",
        "_glance",
        "_growing",
        "_imports",
        "_modules",
        "_places",
        "_state",
        "_tables",
        "latest",
        "memory",
        "number",
    )

    def __init__(self, code: Code) -> None:
        self.number = -1
        places = _places_of(code)
        tables: dict[int, tuple[Any, dict[str, None]]] = {}
        for place, name in places:
            if name:
                tables.setdefault(id(place), (place, {}))[1][name] = None
        self._tables = [(_item_of(place), [*names]) for place, names in tables.values()]
        self._cells = [place for place, name in places if not name]
        self._places = [(place, name) for place, names in tables.values() for name in names]
        self._places += [(cell, "") for cell in self._cells]
        roots = [_now(*place) for place in self._places]
        for function in code.functions:
            roots += [function.__defaults__, function.__kwdefaults__, function.__dict__ or None]
        named = _named_by(code, roots)
        self._state = State(roots, most_objects=_MOST_OBJECTS, is_brief=True, named=named)
        self._glance = Glance(self._state.objects, named)
        self._modules = [(vars(module), dict(vars(module))) for module in self._state.modules[:_MOST_MODULES]]
        self._growing = [*map(vars, code.classes), *map(vars, code.functions)]
        self._classes = frozenset(map(id, code.classes))
        self._imports = [*dict.fromkeys(name for function in code.functions for name in imported_by(function))]
        self.memory = self._state.memory
        self.latest = self.look()

    def look(self) -> list[Any]:
        """Returns what is there now: first what the places hold, in their order.

        Raises:
            KeyError: A variable is gone.
        """
        found: list[Any] = []
        for item_of, names in self._tables:
            found += map(item_of, names)
        if self._cells:
            try:
                found += [*map(_in_cell, self._cells)]
            except ValueError:  # nothing in one of them yet
                found += map(content_of, self._cells)
        if not self._glance.is_empty:
            found += self._glance.contents()
        for attributes, _ in self._modules:
            found += attributes.values()
        found += map(len, self._growing)
        found += map(sys.modules.get, self._imports)
        return found

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors there."""
        return [*self._state.tensors.values()]

    def is_present(self) -> bool:
        """Returns whether all that it shows is there now, unchanged."""
        if not self.latest:
            return True
        try:
            now = self.look()
        except KeyError:
            return False
        if len(now) == len(self.latest) and all(map(operator.is_, now, self.latest)):
            return True
        if not are_same(now, self.latest):
            return False
        self.latest = now  # numbers that are equal may be other objects, which the next look need not compare
        return True

    def put_back(self, present: Snapshot) -> None:
        """Put back what there was; `present` is what there is."""
        for (place, name), then in zip(self._places, self.latest, strict=False):  # behind these is what lies in them
            if _now(place, name) is not then:
                _put(place, name, then)
        mine = {(id(place), name) for place, name in self._places}
        for place, name in present._places:  # a class that this does not show was not reached yet, and stays
            if id(place) in self._classes and (id(place), name) not in mine and name in vars(place):
                _put(place, name, ABSENT)
        self._state.put_back(self._state.changed())
        for attributes, then in self._modules:
            for name in [name for name in attributes if name not in then]:
                del attributes[name]
            attributes.update((name, item) for name, item in then.items() if attributes.get(name, ABSENT) is not item)


class Surroundings:
    """The surroundings of the code of some modules, as they were when the modules were called last.

    Args:
        kinds: The classes of the modules, or that of an autograd function.
        own: Functions that the modules hold themselves.
    """

    def __init__(self, kinds: Iterable[type], own: Iterable[types.FunctionType] = ()) -> None:
        self._kinds, self._own = tuple(kinds), tuple(own)
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._num_snapshots = 0
        self.snapshot = self._take()
        self.is_empty = not self.snapshot.latest
        """True if the code reads nothing beside its modules: that of torch's own."""

    def look(self) -> bool:
        """Take a new snapshot if something has changed; whether it has."""
        if self.is_empty or self.snapshot.is_present():
            return False
        self.snapshot = self._take()
        return True

    def _take(self) -> Snapshot:
        snapshot = Snapshot(code_of_kinds(self._kinds, self._own))
        content = tuple(canonical(item) if is_plain(item) else ById(item) for item in snapshot.latest)
        self._num_snapshots += 1
        snapshot.number = self._numbers.setdefault(content, self._num_snapshots)
        if len(self._numbers) > _MOST_KNOWN:
            del self._numbers[next(iter(self._numbers))]
        return snapshot


def _places_of(code: Code) -> list[_Place]:
    """Returns the places where what is around some code can be bound again."""
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
        near += ambient_of(function)
        seen.update(((id(place), name), (place, name)) for place, name in near)
    return [*places, *seen.values()]


def _named_by(code: Code, roots: Iterable[Any]) -> Callable[[Any], Names]:
    """Gives for an object the attributes that some code, or the object's own methods, can read."""
    named = {name for function in code.functions for name in (*names_in(function), *texts_in(function))}
    for getter in (root for root in roots if isinstance(root, _GETTERS)):
        named.update(part for text in getter.__reduce__()[1] if isinstance(text, str) for part in text.split("."))
    names = frozenset(named)
    reads_all = not names.isdisjoint(_READ_ALL) or any(map(_copies_attributes, code.functions))
    is_matching = any(map(matches_by_position, code.functions))

    @functools.cache
    def of_kind(kind: type) -> Names:
        found = names_read(kind, names)
        if is_matching:
            found |= frozenset(getattr(kind, "__match_args__", ()))
        is_open = reads_all or not (found - names).isdisjoint(_READ_ALL)
        return None if is_open and not kind.__module__.startswith("torch.") else found

    return lambda item: of_kind(type(item))


def _copies_attributes(function: types.FunctionType) -> bool:
    """Returns whether a function's code names what reads all attributes of an object, in its own file or as
    `copy.copy`."""
    names, table = names_in(function), function.__globals__
    modules = [table[name] for name in ("copy", "dataclasses") if isinstance(table.get(name), types.ModuleType)]
    named = [each.get(name) for name in ("copy", "replace") if name in names for each in (table, *map(vars, modules))]
    return any(item is reader for item in named for reader in _READERS)


def _table(place: Any) -> Mapping[str, Any]:
    return vars(place) if isinstance(place, type) else place


def _item_of(place: Any) -> Callable[[str], Any]:
    return place.item_of if isinstance(place, Ambient) else _table(place).__getitem__


def _now(place: Any, name: str) -> Any:
    if isinstance(place, types.CellType):
        return content_of(place)
    return place.item_of(name) if isinstance(place, Ambient) else _table(place).get(name, ABSENT)


def _put(place: Any, name: str, item: Any) -> None:
    """Bind a variable to what it held."""
    if isinstance(place, types.CellType):
        if item is ABSENT:
            del place.cell_contents
        else:
            place.cell_contents = item
    elif isinstance(place, Ambient):
        place.put(name, item)
    elif isinstance(place, dict):
        if item is ABSENT:
            place.pop(name, None)
        else:
            place[name] = item
    elif item is ABSENT:
        delattr(place, name)
    else:
        setattr(place, name, item)

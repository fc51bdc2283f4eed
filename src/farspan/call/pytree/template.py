"""One language for object graphs that hold tensors: (hashable template, list of tensors), and back again.

    flatten(({"x": a, "n": 3}, [a, b]))  ->  template, [a, b]        a appears once
    rebuild(template, [c, d])            ->  ({"x": c, "n": 3}, [c, d])

The template is the cache key of a call's metadata, and how arguments are copied and outputs made. Containers are
rebuilt as what they were: named tuples, dataclasses, ordered and default dictionaries, objects with attributes; an
object that appears twice is one object again. What cannot hold tensors that matter here (functions, modules, classes,
generators, arrays) is taken by identity, and the template keeps it alive.
"""

from __future__ import annotations

import copy
import enum
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from farspan.call.pytree.by_id import ById, is_told_by_bits
from farspan.call.pytree.construction import new_object, new_tuple, note_used, put_attribute

__all__ = [
    "ATOM",
    "Flattener",
    "Rebuilder",
    "can_describe",
    "flatten",
    "flatten_arguments",
    "is_one_of_a_kind",
    "map_tensors",
    "plain_arguments",
    "rebuild",
    "shape_of_call",
    "slots_of",
]

_TENSOR, ATOM, _LIST, _TUPLE, _NAMED, _DICT, _SET, _OBJECT, _AGAIN, _SLICE, _GIVEN = range(11)

_ATOMS: frozenset[type] = frozenset(
    {
        int, float, bool, str, bytes, complex, type(None), type(Ellipsis), type(NotImplemented), torch.dtype,
        torch.device, torch.Size, torch.layout, torch.memory_format, range, torch.SymInt,
    }
)  # fmt: skip
_SIZES = frozenset({int})
_FLOATING = frozenset({float, complex})
_KEYS = frozenset({str, int, bool, bytes, float, tuple})
_BY_IDENTITY = (
    torch.nn.Module, torch.Generator, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    types.ModuleType, np.ndarray, np.generic, functools.partial,
)  # fmt: skip


class Flattener:
    """Walks over one object graph, or over several that share tensors and objects, and describes it."""

    __slots__ = ("given", "has_opaque", "known", "names_given", "seen", "slots", "tensors")

    def __init__(self, given: Mapping[int, int] | None = None, known: Collection[int] = ()) -> None:
        self.known = known
        """Ids of what may be held by identity: every rank has one of it."""
        self.given = given or {}
        """Numbers, by id, of objects that are named instead of described: a call's own mutable arguments."""
        self.names_given = False
        self.has_opaque = False
        """True if something other than a class, and not known, is held by identity."""
        self.tensors: list[torch.Tensor] = []
        self.slots: dict[int, int] = {}
        self.seen: dict[int, tuple[int, Any]] = {}

    def walk(self, item: Any) -> Any:
        kind = type(item)
        if kind in _ATOMS:
            return (ATOM, kind, _by_value(kind, item))
        if isinstance(item, torch.Tensor):
            slot = self.slots.get(id(item))
            if slot is None:
                slot = self.slots[id(item)] = len(self.tensors)
                self.tensors.append(item)
            return (_TENSOR, slot)
        if kind is tuple:
            return (_TUPLE, tuple([self.walk(part) for part in item]))
        if isinstance(item, tuple) and not isinstance(item, _BY_IDENTITY):
            parts = tuple([self.walk(part) for part in item])
            note_used(kind)
            return (_NAMED, kind, parts) if hasattr(kind, "_fields") else (_NAMED, ById(kind), parts)
        if isinstance(item, _BY_IDENTITY):
            self.has_opaque |= not isinstance(item, type) and id(item) not in self.known
            note_used(item if isinstance(item, type) else kind)
            return (ATOM, kind, ById(item))
        if isinstance(item, enum.Enum):
            note_used(kind)
            return (ATOM, kind, item)
        if kind is slice:
            return (_SLICE, self.walk((item.start, item.stop, item.step)))
        if is_one_of_a_kind(item):
            self.has_opaque |= id(item) not in self.known
            return (ATOM, kind, ById(item))
        known = self.seen.get(id(item))
        if known is not None:
            return (_AGAIN, known[0])
        if id(item) in self.given:
            self.names_given = True
            return (_GIVEN, self.given[id(item)])
        number = len(self.seen)
        self.seen[id(item)] = (number, item)  # holds the item: its id stays its own
        return self.contents(item, number)

    def contents(self, item: Any, number: int) -> Any:
        """Describe what is in a list, dictionary, set or object."""
        kind = type(item)
        if kind is list:
            return (_LIST, number, tuple([self.walk(part) for part in item]))
        if kind is dict:
            return (_DICT, number, dict, tuple([(self._key(key), self.walk(part)) for key, part in item.items()]), ())
        note_used(kind)
        if isinstance(item, dict):
            items = OrderedDict.items(item) if isinstance(item, OrderedDict) else dict.items(item)
            pairs = tuple([(self._key(key), self.walk(part)) for key, part in items])
            return (_DICT, number, kind, pairs, self._attributes(item))
        if isinstance(item, list):
            held = (_LIST, -1, tuple([self.walk(part) for part in list.__iter__(item)]))
            return (_OBJECT, number, kind, (("", held), *self._attributes(item)))
        if isinstance(item, deque):
            held = (_LIST, -1, tuple([self.walk(part) for part in item]))
            return (_OBJECT, number, kind, (("", held, item.maxlen), *self._attributes(item)))
        if kind in (set, frozenset):
            if any(isinstance(part, torch.Tensor) for part in item):
                return self._opaque(item)
            return (_SET, number, kind, frozenset(self._key(part) for part in item))
        attributes = self._attributes(item)
        if attributes or _is_plain_object(item):
            return (_OBJECT, number, kind, attributes)
        return self._opaque(item)

    def _opaque(self, item: Any) -> Any:
        """Hold an object by its identity, wherever it occurs: nobody makes it anew, and it needs no number."""
        self.seen.pop(id(item), None)
        self.has_opaque |= id(item) not in self.known
        return (ATOM, type(item), ById(item))

    def _attributes(self, item: Any) -> tuple[Any, ...]:
        slots = [name for base in type(item).__mro__ for name in slots_of(base) if hasattr(item, name)]
        found = [(name, self.walk(getattr(item, name))) for name in slots]
        found.extend((name, self.walk(part)) for name, part in getattr(item, "__dict__", {}).items())
        if isinstance(item, defaultdict):
            found.append(("default_factory", self.walk(item.default_factory)))
        return tuple(found)

    @staticmethod
    def _key(key: Any) -> Any:
        return key if type(key) in _KEYS else ById(key)


def _by_value(kind: type, item: Any) -> Any:
    """Returns what stands for a plain value: `==` has to tell it from others."""
    return ById(item) if kind in _FLOATING and is_told_by_bits(item) else item


def slots_of(cls: type) -> list[str]:
    """Returns the attributes that a class keeps in slots of its own."""
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    private = f"_{cls.__name__.lstrip('_')}"
    names = [private + name if name.startswith("__") and not name.endswith("__") else name for name in names]
    return [name for name in names if name not in ("__weakref__", "__dict__")]


_has_own_reduce: dict[type, bool] = {}


def is_one_of_a_kind(item: Any) -> bool:
    """Returns whether a copy of `item` is the object itself, as of a logger: it is taken by identity."""
    kind = type(item)
    has_own = _has_own_reduce.get(kind)
    if has_own is None:
        has_own = _has_own_reduce[kind] = (
            kind.__flags__ & (1 << 9) != 0
            and not isinstance(item, (*_BY_IDENTITY, torch.Tensor, enum.Enum))
            and any("__reduce__" in cls.__dict__ or "__reduce_ex__" in cls.__dict__ for cls in kind.__mro__[:-1])
        )
    if not has_own:
        return False
    try:
        return copy.copy(item) is item
    except Exception:  # the object's own code: what cannot be copied is no such thing
        return False


def _is_plain_object(item: Any) -> bool:
    return type(item).__flags__ & (1 << 9) != 0 and hasattr(item, "__dict__")  # a heap type: a Python class


def flatten(item: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return `item`'s template and its tensors in order of first appearance."""
    flattener = Flattener()
    return flattener.walk(item), flattener.tensors


def can_describe(item: Any, known: Collection[int] = ()) -> bool:
    """Returns whether a template says all about `item`, and holds by identity only classes and ids in `known`."""
    flattener = Flattener(known=known)
    flattener.walk(item)
    return not flattener.has_opaque


def shape_of_call(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
    """Returns a short hashable substitute for the template, where arguments are different tensors, plain values, sizes.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        tensors: The tensors among them are appended, in template order.

    Returns:
        None where an argument is anything else, or a tensor appears twice.
    """
    parts: list[Any] = []
    seen: set[int] = set()
    for item in (*args, *kwargs.values()) if kwargs else args:
        kind = type(item)
        if kind in _ATOMS:
            parts.append((kind, _by_value(kind, item)))
        elif isinstance(item, torch.Tensor) and id(item) not in seen:
            seen.add(id(item))
            tensors.append(item)
            parts.append(None)
        elif kind is tuple and set(map(type, item)) <= _SIZES:
            parts.append((kind, item))
        else:
            tensors.clear()
            return None
    return (len(args), tuple(kwargs), tuple(parts))


def flatten_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """`flatten((args, kwargs))`, in a short way where all arguments are tensors and plain values."""
    tensors: list[torch.Tensor] = []
    slots: dict[int, Any] = {}

    def part_of(item: Any) -> Any:
        kind = type(item)
        if kind in _ATOMS:
            return (ATOM, kind, _by_value(kind, item))
        if isinstance(item, torch.Tensor):
            part = slots.get(id(item))
            if part is None:
                part = slots[id(item)] = (_TENSOR, len(tensors))
                tensors.append(item)
            return part
        return None

    positional = tuple([part_of(item) for item in args])
    named = tuple([(name, part_of(item)) for name, item in kwargs.items()])
    if None in positional or any(part is None for _, part in named):
        return flatten((args, kwargs))
    return (_TUPLE, ((_TUPLE, positional), (_DICT, 0, dict, named, ()))), tensors


def rebuild(template: Any, tensors: Sequence[Any]) -> Any:
    """Make a new object graph from `template` with `tensors` in its slots (anything may take the place of a tensor)."""
    if template[0] == _TENSOR:
        return tensors[template[1]]
    return Rebuilder(tensors).build(template)


def plain_arguments(template: Any, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """Returns the arguments of a call, positional and by keyword, where all are tensors and plain values; else None.

    Args:
        template: Of both, and perhaps of more.
        tensors: Those among the arguments.
    """
    if len(template[1]) > 2:
        return None
    (_, positional), (_, _, _, named, _) = template[1]
    values: list[Any] = []
    for part in [*positional, *[part for _, part in named]] if named else positional:
        if part[0] == _TENSOR:
            values.append(tensors[part[1]])
        elif part[0] == ATOM and type(part[2]) is not ById:
            values.append(part[2])
        else:
            return None
    count = len(positional)
    return values[:count], dict(zip([name for name, _ in named], values[count:], strict=True))


class Rebuilder:
    """Makes object graphs that share tensors and objects."""

    __slots__ = ("given", "made", "tensors")

    def __init__(self, tensors: Sequence[Any], given: Mapping[int, Any] | None = None) -> None:
        self.tensors = tensors
        self.given = given or {}
        """The objects that templates name instead of describing."""
        self.made: dict[int, Any] = {}
        """All new objects, by number."""

    def build(self, template: Any) -> Any:
        kind = template[0]
        if kind == _TENSOR:
            return self.tensors[template[1]]
        if kind == ATOM:
            value = template[2]
            return value.value if type(value) is ById else value
        if kind == _TUPLE:
            return tuple([self.build(part) for part in template[1]])
        if kind == _NAMED:
            _, cls, parts = template
            values = [self.build(part) for part in parts]
            return new_tuple(cls.value if type(cls) is ById else cls, values)
        if kind == _AGAIN:
            return self.made[template[1]]
        if kind == _GIVEN:
            return self.given[template[1]]
        if kind == _SLICE:
            return slice(*self.build(template[1]))
        result: Any
        if kind == _SET:
            result = self.made[template[1]] = template[2](map(_plain, template[3]))
            return result
        result = self.made[template[1]] = [] if kind == _LIST else new_object(template[2])
        self.fill(result, template)
        return result

    def fill(self, result: Any, template: Any) -> None:
        """Put into the empty `result` what `template` says is in it."""
        kind = template[0]
        if kind == _LIST:
            result.extend([self.build(part) for part in template[2]])
        elif kind == _SET:
            result.update(map(_plain, template[3]))
        elif kind == _DICT:
            _, _, cls, pairs, attributes = template
            for key, part in pairs:
                dict.__setitem__(result, _plain(key), self.build(part))
                if cls is not dict and issubclass(cls, OrderedDict):
                    _restore_order(result, _plain(key))
            self._set_attributes(result, attributes)
        else:
            assert kind == _OBJECT
            self._set_attributes(result, template[3])

    def refill(self, item: Any, template: Any) -> None:
        """Let the list, dictionary, set or object `item` hold what `template` says, and nothing else."""
        kind = template[0]
        if isinstance(item, OrderedDict):
            OrderedDict.clear(item)
        elif isinstance(item, dict):
            dict.clear(item)
        elif isinstance(item, list):
            list.clear(item)
        elif kind == _SET:
            item.clear()
        attributes = {name for name, *_ in template[4 if kind == _DICT else 3]} if kind in (_DICT, _OBJECT) else ()
        for name in [name for name in getattr(item, "__dict__", {}) if name not in attributes]:
            del item.__dict__[name]
        self.fill(item, template)

    def _set_attributes(self, result: Any, attributes: Any) -> None:
        for name, part, *length in attributes:
            value = self.build(part)
            if length:
                deque.__init__(result, value, length[0])
            elif name == "":
                list.extend(result, value)
            else:
                put_attribute(result, name, value)


def _plain(key: Any) -> Any:
    return key.value if type(key) is ById else key


def _restore_order(result: Any, key: Any) -> None:
    """An OrderedDict keeps its own list of keys, which dict.__setitem__ does not extend."""
    OrderedDict.__setitem__(result, key, dict.__getitem__(result, key))


def map_tensors(item: Any, function: Any) -> Any:
    """Copy `item` with `function` applied to each of its tensors once."""
    template, tensors = flatten(item)
    return rebuild(template, [function(tensor) for tensor in tensors])

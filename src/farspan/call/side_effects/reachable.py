"""Walks over what can be reached from objects in Python: contents of lists, dictionaries, sets and objects, at any
depth.

A run on fakes must leave no trace in them; and what a real run will change in them is found by what the fake one did.
Tensors, modules, functions and classes are ends, and so are objects of most of torch's own classes (a loader): nothing
is looked for behind them. A root behind which there is too much (a trainer, with all that it holds) is not
followed at all.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from farspan.call.pytree.template import is_one_of_a_kind, slots_of
from farspan.torch_private import is_wrapped

__all__ = ["REAL", "Glance", "Names", "State", "are_same", "is_same"]

_ENDS = (
    torch.Tensor, torch.nn.Module, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType,
    torch.Generator, str, bytes, int, float, complex, type(None), torch.dtype, torch.device, staticmethod, classmethod,
    property,
)  # fmt: skip
REAL = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Classes of tensors that have data on every rank, unless they are placed."""
_VALUES = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""Classes of values that may be many, and lead nowhere."""
_CALLABLES = (types.MethodType, types.BuiltinMethodType, functools.partial)
_UNCHANGING = (tuple, frozenset, *_CALLABLES)
_PLAIN = (bool, int, float, str, bytes, complex)
_CONTAINERS = (dict, list, deque, set)
_SIZED = (*_CONTAINERS, tuple, frozenset)
_LOOKED_INTO = ("torch.distributions.", "torch.optim.")
"""Torch's modules whose objects hold what code reads: of the second kind where attributes are named only."""
_MOST_OBJECTS = 500
"""Limit on the objects that are followed from one root."""
_MOST_BYTES = 2**14
"""Limit on the bytes of an array that `Glance` reads; of a larger array it sees nothing."""
_MOST_ELEMENTS = 1000
"""Limit on the elements of an object that `Glance` reads; of a larger object it sees only how many there are."""
Names = Collection[str] | None
"""The attributes of an object that count, wherever they are not its slots; None for all."""


def _all_names(item: Any) -> Names:
    """Returns all names of attributes: all count."""
    return None


class _Held(NamedTuple):
    """An object, and copies of what it holds: its elements, and its attributes."""

    item: Any
    elements: Any
    attributes: dict[str, Any]
    slots: dict[str, Any]
    names: Names


class State:
    """The contents of all objects that can be reached from `roots`, as they are now.

    Args:
        roots: Those behind which there are more than `most_objects` are not followed.
        most_objects: From one root.
        is_brief: Whether it is taken often, and `Glance` looks for changes: of such a root its own contents are kept
            then, and nothing of containers of more than 1,000 elements, nor of large arrays.
        named: Gives the attributes of an object that are followed, and put back.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        *,
        most_objects: int = _MOST_OBJECTS,
        is_brief: bool = False,
        named: Callable[[Any], Names] = _all_names,
    ) -> None:
        self._most_objects = most_objects
        self._is_brief = is_brief
        self._named = named
        self._held: dict[int, _Held] = {}
        self.ids: set[int] = set()
        """Ids of everything reached, the ends included."""
        self.tensors: dict[int, torch.Tensor] = {}
        self.modules: list[torch.nn.Module] = []
        self.generators: list[torch.Generator] = []
        for root in roots:
            self._follow(root)

    def _follow(self, root: Any) -> None:
        held: dict[int, _Held] = {}
        ids: set[int] = set()
        tensors: list[torch.Tensor] = []
        modules: list[torch.nn.Module] = []
        generators: list[torch.Generator] = []
        stack = [root]
        while stack:
            item = stack.pop()
            if id(item) in self.ids or id(item) in ids:
                continue
            ids.add(id(item))
            if is_one_of_a_kind(item) or (self._is_brief and isinstance(item, _SIZED) and len(item) > _MOST_ELEMENTS):
                continue
            if isinstance(item, torch.Tensor):
                tensors.append(item)
                if not self._is_brief and type(item) is torch.Tensor:
                    held[id(item)] = _Held(item, None, dict(item.__dict__), {}, None)
            elif isinstance(item, torch.nn.Module):
                modules.append(item)
            elif isinstance(item, torch.Generator):
                generators.append(item)
            elif (not isinstance(item, _ENDS) or _changes_container(item)) and not self._is_of_torch(type(item)):
                found = None if self._is_brief and _is_large(item) else _look_into(item, self._named(item))
                if found is not None:
                    held[id(item)] = found
                    if len(held) > self._most_objects:
                        if self._is_brief:
                            self._held[id(root)] = held[id(root)]
                        return
                    stack += [part for part in _parts(found) if type(part) not in _VALUES]
        self._held.update(held)
        self.ids |= ids
        self.tensors.update((id(tensor), tensor) for tensor in tensors)
        self.modules += modules
        self.generators += generators

    def _is_of_torch(self, kind: type) -> bool:
        """Returns whether a class is torch's own, so that nothing is searched behind its objects."""
        name = kind.__module__
        followed = _LOOKED_INTO if self._is_brief else _LOOKED_INTO[:1]
        return name.startswith("torch.") and not name.startswith(followed)

    @property
    def memory(self) -> list[int]:
        """Returns the memory of the plain tensors, by numbers; and the tensors that may get other memory, by their
        ids."""
        plain = [item for item in self.tensors.values() if type(item) in REAL and not is_wrapped(item)]
        memory = [item.untyped_storage()._cdata for item in plain if item.layout is torch.strided]
        return [*memory, *map(id, plain)]

    @property
    def objects(self) -> list[Any]:
        """Returns all objects that can be changed."""
        return [held.item for held in self._held.values() if not isinstance(held.item, _UNCHANGING)]

    def has_changed_array(self, ids: Iterable[int]) -> bool:
        """Returns whether one of the objects `ids` is an array."""
        return any(key in self._held and isinstance(self._held[key].item, np.ndarray) for key in ids)

    def has_changed_tensor(self, ids: Iterable[int]) -> bool:
        """Returns whether one of the objects `ids` is a tensor, and so whether attributes of it have changed."""
        return any(key in self._held and isinstance(self._held[key].item, torch.Tensor) for key in ids)

    def has_changed_behind_callable(self, ids: Collection[int]) -> bool:
        """Returns whether one of the objects `ids` is known to a bound method or a partial function: no copy of it
        would be."""
        return any(self.reaches(item, ids) for item in self.callables)

    @property
    def callables(self) -> list[Any]:
        """The bound methods and partial functions."""
        return [held.item for held in self._held.values() if isinstance(held.item, _CALLABLES)]

    @property
    def holders(self) -> list[Any]:
        """The objects whose elements and attributes can be exchanged for others."""
        return [held.item for held in self._held.values() if not isinstance(held.item, (*_UNCHANGING, np.ndarray))]

    def changed(self, *, with_arrays: bool = True) -> set[int]:
        """Returns ids of the objects that hold something else now."""
        held = self._held.items()
        return {
            key
            for key, each in held
            if (with_arrays or not isinstance(each.item, np.ndarray)) and not _is_as_before(each)
        }

    def reaches(self, root: Any, ids: Collection[int]) -> bool:
        """Returns whether one of the objects `ids` could be reached from `root`."""
        if not ids:
            return False
        stack, seen = [root], set[int]()
        while stack:
            item = stack.pop()
            if id(item) in ids:
                return True
            held = self._held.get(id(item))
            if held is not None and id(item) not in seen:
                seen.add(id(item))
                stack += _parts(held)
        return False

    def put_back(self, ids: Iterable[int]) -> None:
        """Let the objects `ids` hold what they held."""
        for key in ids:
            if key in self._held:
                _fill(self._held[key])


class Glance:
    """Remembers what some objects hold, by identity: to see quickly, and often, whether something has changed.

    Args:
        objects: Where there are none, nothing ever changes.
        named: Gives the attributes of an object that are compared.
    """

    __slots__ = ("_arrays", "_containers", "_latest", "_slots", "_with_attributes", "is_empty")

    def __init__(self, objects: Iterable[Any], named: Callable[[Any], Names] = _all_names) -> None:
        arrays = [item for item in objects if isinstance(item, np.ndarray)]
        others = [item for item in objects if not isinstance(item, np.ndarray)]
        self._arrays = [item for item in arrays if not _is_large(item)]
        self._containers = [item for item in others if isinstance(item, _CONTAINERS)]
        self._with_attributes = [(item, _present(item, named(item))) for item in others if hasattr(item, "__dict__")]
        self._slots = [(item, name) for item in others for cls in type(item).__mro__[:-1] for name in slots_of(cls)]
        self.is_empty = not (self._with_attributes or self._containers or self._slots or self._arrays)
        """True if there is nothing to compare."""
        self._latest = self.contents()

    def has_changed(self) -> bool:
        """Returns whether the objects differ from when this was made."""
        return not self.is_empty and not are_same(self.contents(), self._latest)

    def contents(self) -> list[Any]:
        """Returns all that the objects hold now, one behind the other; of a large container how much, of an array its
        bytes."""
        found: list[Any] = []
        for item, names in self._with_attributes:
            attributes = item.__dict__
            found += attributes.values() if names is None else map(attributes.get, names)
            found.append(len(attributes))
        for item in self._containers:
            found.append(len(item))
            found += _elements_of(item)
        found += [getattr(item, name, None) for item, name in self._slots]
        found += [item.tobytes() for item in self._arrays]
        return found


def are_same(now: list[Any], then: list[Any]) -> bool:
    """Returns whether two lists hold the same objects, or numbers and texts that cannot be told apart."""
    return len(now) == len(then) and (all(map(operator.is_, now, then)) or all(map(is_same, now, then)))


def _elements_of(item: Any) -> list[Any]:
    """Returns what a container that is not large holds.

    Classes of the program may iterate in another way than lists and dictionaries do, and without end.
    """
    if len(item) > _MOST_ELEMENTS:
        return []
    if isinstance(item, dict):
        kind: Any = OrderedDict if isinstance(item, OrderedDict) else dict  # the former keeps an order of its own
        return [*kind.keys(item), *kind.values(item)]
    return [*(list.__iter__(item) if isinstance(item, list) else item)]


def _changes_container(item: Any) -> bool:
    """Returns whether an object is a method of one list, dictionary or set: `self.log.append`."""
    return isinstance(item, types.BuiltinMethodType) and isinstance(item.__self__, _CONTAINERS)


def _items_of(item: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Returns the items in their order, which an ordered dictionary keeps for itself."""
    return OrderedDict.items(item) if isinstance(item, OrderedDict) else dict.items(item)


def _is_large(item: Any) -> bool:
    """Returns whether it is an array that is too costly to read often: one of many bytes, or of objects."""
    return isinstance(item, np.ndarray) and (item.nbytes > _MOST_BYTES or item.dtype.hasobject)


def _present(item: Any, names: Names) -> list[str] | None:
    """Returns those of the attributes that it has; None for all."""
    return None if names is None else [name for name in getattr(item, "__dict__", {}) if name in names]


def _look_into(item: Any, names: Names) -> _Held | None:
    elements: Any = None
    if isinstance(item, dict):
        elements = list(_items_of(item))
    elif isinstance(item, list):
        elements = list.copy(item)
    elif isinstance(item, deque):
        elements = list(item)
    elif isinstance(item, (tuple, frozenset)):
        return _Held(item, tuple(item), {}, {}, names)
    elif isinstance(item, (types.MethodType, types.BuiltinMethodType)):
        return _Held(item, (item.__self__,), {}, {}, names)
    elif isinstance(item, functools.partial):
        return _Held(item, (item.func, *item.args, item.keywords), {}, {}, names)
    elif isinstance(item, set):
        elements = set(item)
    elif isinstance(item, np.ndarray):
        return _Held(item, item.copy(), {}, {}, names) if not item.dtype.hasobject else None
    attributes = {name: part for name, part in getattr(item, "__dict__", {}).items() if names is None or name in names}
    slots = {name: getattr(item, name) for cls in type(item).__mro__ for name in slots_of(cls) if hasattr(item, name)}
    if elements is None and not attributes and not slots and not hasattr(item, "__dict__"):
        return None
    return _Held(item, elements, attributes, slots, names)


def _parts(held: _Held) -> list[Any]:
    parts = [*held.attributes.values(), *held.slots.values()]
    if isinstance(held.item, dict):
        parts += [part for pair in held.elements for part in pair]
    elif held.elements is not None and not isinstance(held.item, np.ndarray):
        parts += held.elements
    return parts


def _is_as_before(held: _Held) -> bool:
    item = held.item
    if isinstance(item, _UNCHANGING):
        return True
    if isinstance(item, torch.Tensor) and type(item) is not torch.Tensor:
        return True  # a recorded tensor has taken its place, and what that holds is ours
    if isinstance(item, np.ndarray):
        return item.shape == held.elements.shape and item.tobytes() == held.elements.tobytes()
    now = _look_into(item, held.names)
    if now is None:
        return not held.attributes and not held.slots
    if isinstance(item, set):
        return now.elements == held.elements and _is_same_dict(now, held)
    if held.elements is not None:
        if len(now.elements) != len(held.elements):
            return False
        if isinstance(item, dict):
            same = all(
                key is then or key == then if isinstance(key, _PLAIN) else key is then
                for (key, _), (then, _) in zip(now.elements, held.elements, strict=True)
            )
            pairs = zip((part for _, part in now.elements), (part for _, part in held.elements), strict=True)
            if not same or not all(is_same(part, then) for part, then in pairs):
                return False
        elif not all(map(is_same, now.elements, held.elements)):
            return False
    return _is_same_dict(now, held)


def _is_same_dict(now: _Held, held: _Held) -> bool:
    return all(
        mine.keys() == then.keys() and all(is_same(part, then[name]) for name, part in mine.items())
        for mine, then in ((now.attributes, held.attributes), (now.slots, held.slots))
    )


def is_same(part: Any, then: Any) -> bool:
    """Returns whether two parts are one object, or numbers and texts that cannot be told apart."""
    if part is then:
        return True
    if type(part) is not type(then) or not isinstance(part, _PLAIN) or part != then:
        return False
    return not isinstance(part, (float, complex)) or repr(part) == repr(then)  # 0.0 == -0.0


def _fill(held: _Held) -> None:
    item = held.item
    if isinstance(item, np.ndarray):
        item[...] = held.elements
        return
    if isinstance(item, dict):
        if hasattr(type(item), "move_to_end"):
            type(item).clear(item)
            for key, part in held.elements:
                type(item).__setitem__(item, key, part)
        else:
            dict.clear(item)
            dict.update(item, held.elements)
    elif isinstance(item, list):
        list.clear(item)
        list.extend(item, held.elements)
    elif isinstance(item, (deque, set)):
        item.clear()
        item.extend(held.elements) if isinstance(item, deque) else item.update(held.elements)
    if hasattr(item, "__dict__"):
        if held.names is None:
            item.__dict__.clear()
        for name in _present(item, held.names) or ():
            if name not in held.attributes:
                del item.__dict__[name]
        item.__dict__.update(held.attributes)
    for cls in type(item).__mro__:
        for name in slots_of(cls):
            if name in held.slots:
                object.__setattr__(item, name, held.slots[name])
            elif hasattr(item, name):
                object.__delattr__(item, name)

"""Templates that have come from another rank: whether they are templates at all, and may be rebuilt here.

Checked are the kinds of nodes, their arity, slots and numbers, that a class fits the node that names it, and that
nothing would be called: a template that has passed is rebuilt without an exception.
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from farspan.call.pytree.by_id import ById
from farspan.call.pytree.construction import is_struct, maker_of
from farspan.call.pytree.template import (  # fmt: skip
    _AGAIN,
    _ATOMS,
    _DICT,
    _GIVEN,
    _LIST,
    _NAMED,
    _OBJECT,
    _SET,
    _SLICE,
    _TENSOR,
    _TUPLE,
    ATOM,
)
from farspan.call.wire.known_classes import Known
from farspan.errors import RecordError

__all__ = ["Checker", "damaged", "is_tuple_of", "nodes_of"]

_MAKERS = [dict.__new__, OrderedDict.__new__, defaultdict.__new__, list.__new__, deque.__new__, object.__new__]
_MAKERS += [types.SimpleNamespace.__new__]
_NOT_OBJECTS = (type, enum.Enum, torch.Tensor, torch.nn.Module, torch.Generator, np.ndarray, BaseException)
_PLAIN = (str, int, bool, bytes, float, complex, type(None))
_NUMBERED = {_LIST: 3, _DICT: 5, _SET: 4, _OBJECT: 4}
"""Nodes of objects that can occur again, and their lengths."""


def damaged(what: str) -> RecordError:
    """Returns the error of a text that no rank of this version writes."""
    return RecordError(
        f"what another rank has sent cannot be read: {what}.",
        why="it is not what farspan writes: damaged on its way, or written by another version or program.",
        hint="start all ranks with the same installation of farspan",
    )


def is_tuple_of(item: Any, kind: type) -> bool:
    return type(item) is tuple and all(type(part) is kind for part in item)


def nodes_of(template: Any) -> dict[int, Any]:
    """Returns the nodes of lists, dictionaries, sets and objects in a template of this rank's, by number."""
    found: dict[int, Any] = {}
    stack = [template]
    while stack:
        part = stack.pop()
        if type(part) is not tuple:
            continue
        if len(part) > 2 and type(part[0]) is int and _NUMBERED.get(part[0]) == len(part) and type(part[1]) is int:
            found.setdefault(part[1], part)
        stack.extend(part)
    return found


class Checker:
    """Checks the templates of one text, which share tensors and objects.

    Args:
        num_tensors: How many tensors there are.
        known: What the text may name.
        given: By number, the argument objects of the call that it may refer to: nodes of the call's template.
    """

    def __init__(self, num_tensors: int, known: Known, given: Mapping[int, Any] | None = None) -> None:
        self.num_tensors = num_tensors
        self.known = known
        self.given = given or {}
        self.made: set[int] = set()

    def check(self, node: Any) -> None:
        """Raise if `node` is no template.

        Raises:
            RecordError: It says what is wrong.
        """
        kind = node[0] if type(node) is tuple and node else None
        if type(kind) is not int:
            raise damaged("a part of an object without a kind")
        lengths = {_TENSOR: 2, ATOM: 3, _TUPLE: 2, _NAMED: 3, _AGAIN: 2, _GIVEN: 2, _SLICE: 2, **_NUMBERED}
        if len(node) != lengths.get(kind):
            raise damaged(f"a part of an object of kind {kind} with {len(node)} entries")
        if kind == _TENSOR:
            self._check_number(node[1], range(self.num_tensors), "tensor")
        elif kind == ATOM:
            self._check_atom(node)
        elif kind == _TUPLE:
            self._check_parts(node[1])
        elif kind == _NAMED:
            self._check_named(node)
        elif kind == _AGAIN:
            self._check_number(node[1], self.made, "object")
        elif kind == _GIVEN:
            self._check_number(node[1], self.given, "argument")
        elif kind == _SLICE:
            ends = node[1]
            self.check(ends)
            if ends[0] != _TUPLE or len(ends[1]) != 3:
                raise damaged("a slice without three ends")
        else:
            self._check_numbered(node)

    def check_contents(self, number: Any, node: Any) -> None:
        """Raise if `node` cannot be the new contents of the argument object `number`."""
        self._check_number(number, self.given, "argument")
        old = self.given[number]
        same = type(node) is tuple and node[:1] == old[:1] and (old[0] == _LIST or node[2:3] == old[2:3])
        if not same:
            raise damaged(f"other contents of argument object {number} than its class can have")
        self.check(node)

    def _check_parts(self, parts: Any) -> None:
        if type(parts) is not tuple:
            raise damaged("parts that are no sequence")
        for part in parts:
            self.check(part)

    @staticmethod
    def _check_number(number: Any, known: Collection[int], what: str) -> None:
        if type(number) is not int or number not in known:
            raise damaged(f"there is no {what} {str(number)[:40]}")

    @staticmethod
    def _check_atom(node: Any) -> None:
        _, kind, value = node
        is_held = type(value) is ById
        plain = value.value if is_held else value
        if type(plain) is not kind or not (is_held or kind in _ATOMS or isinstance(plain, enum.Enum)):
            raise damaged(f"a value of class {type(plain).__name__} in the place of another")

    def _check_named(self, node: Any) -> None:
        cls = node[1].value if type(node[1]) is ById else node[1]
        if not isinstance(cls, type) or not issubclass(cls, tuple) or type(node[2]) is not tuple:
            raise damaged("a named tuple of a class that is none")
        fields = getattr(cls, "_fields", None)
        num = getattr(cls, "n_sequence_fields", None) if is_struct(cls) else fields and len(fields)
        if (num is not None and num != len(node[2])) or (maker_of(cls) is not tuple.__new__ and not is_struct(cls)):
            raise damaged(f"a {cls.__name__} of {len(node[2])} entries")
        _refuse_finalizer(cls)
        self._check_parts(node[2])

    def _check_numbered(self, node: Any) -> None:
        kind, number = node[0], node[1]
        if type(number) is not int or not -1 <= number < 1 << 40:
            raise damaged("an object without a number")
        if kind == _SET:
            if node[2] not in (set, frozenset) or type(node[3]) is not frozenset:
                raise damaged("a set of another class")
            for key in node[3]:
                _check_key(key)
        if kind in (_LIST, _SET):
            self.made.add(number)
            return self._check_parts(node[2]) if kind == _LIST else None
        cls = node[2]
        _check_class(cls, is_dict=kind == _DICT)
        self.made.add(number)
        if kind == _DICT:
            if type(node[3]) is not tuple:
                raise damaged("a dictionary without pairs")
            for pair in node[3]:
                if type(pair) is not tuple or len(pair) != 2:
                    raise damaged("a dictionary without pairs")
                _check_key(pair[0])
                self.check(pair[1])
        self._check_attributes(cls, node[-1])
        return None

    def _check_attributes(self, cls: type, attributes: Any) -> None:
        if type(attributes) is not tuple:
            raise damaged("an object without attributes")
        for item in attributes:
            if type(item) is not tuple or not 2 <= len(item) <= 3 or type(item[0]) is not str:
                raise damaged("an attribute without a name")
            name, part = item[:2]
            self.check(part)
            if name == "" or len(item) == 3:
                self._check_elements(cls, item)
            elif name == "default_factory" and issubclass(cls, defaultdict):
                if part[0] != ATOM or not self.known.may_make(_plain(part[2])):
                    raise _not_a_factory(cls, part)
            elif not cls.__dictoffset__ and not _is_slot(cls, name):
                raise damaged(f"a {cls.__name__} has no attribute {name[:40]}")

    @staticmethod
    def _check_elements(kind: type, item: Any) -> None:
        """Raise if `item` is not how a template holds the elements of a subclass of list or deque."""
        name, part, *length = item
        is_list = type(part) is tuple and len(part) == 3 and part[:2] == (_LIST, -1)
        if name != "" or not is_list or not issubclass(kind, deque if length else list):
            raise damaged("elements of what is no list")
        if length and length[0] is not None and (type(length[0]) is not int or not 0 <= length[0] < 1 << 62):
            raise damaged("a deque without a length")


def _plain(item: Any) -> Any:
    return item.value if type(item) is ById else item


def _check_class(cls: Any, *, is_dict: bool) -> None:
    """Raise if no empty object of `cls` can be made without running code of its own."""
    if not isinstance(cls, type) or issubclass(cls, dict) != is_dict or issubclass(cls, _NOT_OBJECTS):
        raise damaged("an object of a class that does not fit it")
    is_made_in_python = cls.__flags__ & (1 << 9) != 0 or cls in (deque, list, types.SimpleNamespace, UserDict, UserList)
    if maker_of(cls) not in _MAKERS or not (is_dict or is_made_in_python) or getattr(cls, "__abstractmethods__", None):
        raise damaged(f"an object of class {cls.__qualname__}")
    _refuse_finalizer(cls)


def _refuse_finalizer(cls: type) -> None:
    """A finalizer would run, on attributes that another rank has chosen."""
    if any("__del__" in vars(base) for base in cls.__mro__):
        raise RecordError(
            f"a {cls.__qualname__} cannot be sent to the other ranks.",
            why="it has a finalizer (`__del__`), which would run once for each copy.",
            hint="return, or read, tensors, numbers, strings, or lists, dictionaries and dataclasses made of them",
        )


def _not_a_factory(cls: type, part: Any) -> RecordError:
    factory = _plain(part[2]) if len(part) == 3 else None
    return RecordError(
        f"a {cls.__qualname__} cannot be sent to the other ranks: it makes defaults by "
        f"{getattr(factory, '__qualname__', 'something unknown')}.",
        why="what another rank names is not called; only list, dict, int and their like are.",
        hint="defaultdict(list), or dict(the dictionary)",
    )


def _is_slot(cls: type, name: str) -> bool:
    found = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
    return type(found) is types.MemberDescriptorType


def _check_key(key: Any, depth: int = 0) -> None:
    """Raise for what may not be hashed, or runs code of its own where it is."""
    key = _plain(key)
    if type(key) in (tuple, frozenset) and depth < 20:
        for part in key:
            _check_key(part, depth + 1)
    elif not (
        type(key) in _PLAIN or type(key) in _ATOMS or isinstance(key, (type, enum.Enum, np.generic, types.FunctionType))
    ):
        raise damaged(f"a key of class {type(key).__name__}")

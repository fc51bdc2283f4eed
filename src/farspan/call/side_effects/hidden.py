"""Objects whose state Python cannot look into: counts, iterators, generators of numpy and `random`, buffers of bytes.

A run on fakes gets copies of those that a module holds, or its code names, so that the objects themselves stay where
they are. If it has
moved a copy on, the module is called part by part: every rank then moves its own object, once for each call. So it is
with what cannot be copied, such as a generator made by `yield`.

    self.steps = itertools.count()      self.noise = random.Random(0)      self.schedule = iter(rates)
"""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from farspan.call.leaf import LeakError
from farspan.call.pytree.by_id import ById
from farspan.call.side_effects.reachable import State
from farspan.call.surroundings.code import code_of, content_of, globals_of

if TYPE_CHECKING:
    from farspan.graph import Template

__all__ = ["copies_of_hidden", "generators_held", "hidden_in"]

_SEEN_THROUGH = (
    torch.Tensor, torch.nn.Module, torch.Generator, type, types.FunctionType, types.MethodType, types.ModuleType, str,
    bytes, int, float, complex, type(None), torch.dtype, torch.device, tuple, list, dict, set, frozenset, deque,
    np.ndarray, np.generic, np.dtype, range, slice,
)  # fmt: skip
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)


class Hidden(NamedTuple):
    """The place where an object with hidden state is held, and a copy of it."""

    table: Any
    key: Any
    item: Any
    copy: Any


def hidden_in(
    roots: Iterable[MutableMapping[Any, Any]], holders: Iterable[Any], *, must_copy: bool = True
) -> list[Hidden]:
    """Returns the objects with hidden state that are held somewhere.

    Args:
        roots: Dictionaries, and the like, that are looked into.
        holders: Lists, dictionaries and objects that are looked into as well.
        must_copy: Whether there has to be a copy of each; else those without one are left out.

    Raises:
        LeakError: Of one of them there can be no copy.
    """
    tables: list[Any] = [*roots]
    for holder in holders:
        tables += [holder] if isinstance(holder, (dict, list, deque)) else []
        tables += [vars(holder)] if hasattr(holder, "__dict__") else []
    found: list[Hidden] = []
    copies: dict[int, Any] = {}
    for table in tables:
        for key, item in list(enumerate(table) if isinstance(table, (list, deque)) else table.items()):
            if not _may_hide(item):
                continue
            if id(item) not in copies:
                try:
                    copies[id(item)] = _copied(item)
                except LeakError:
                    if must_copy:
                        raise
                    copies[id(item)] = item
            if copies[id(item)] is not item:
                found.append(Hidden(table, key, item, copies[id(item)]))
    return found


@contextmanager
def copies_of_hidden(hidden: list[Hidden]) -> Iterator[None]:
    """Let copies stand where the objects are, in the body.

    Raises:
        LeakError: A copy has been moved on in the body.
    """
    before = [_state_of(each.item) for each in hidden]
    for each in hidden:
        each.table[each.key] = each.copy
    try:
        yield
    finally:
        for each in hidden:
            if _held_at(each) is each.copy:
                each.table[each.key] = each.item
        for each, state in zip(hidden, before, strict=True):
            if _state_of(each.copy) != state:
                raise LeakError(f"it moves on a {type(each.item).__name__}")


def generators_held(modules: Sequence[torch.nn.Module], template: Template) -> list[torch.Generator]:
    """Returns the generators of torch's that modules hold, that their code names, or that a call is given: the
    program's, and not made by the call itself.

    Args:
        modules: Of a leaf.
        template: Of the arguments of its call.
    """
    functions = code_of(modules)[1]
    roots = [item for module in modules for item in vars(module).values()]
    roots += [item for function in functions for _, item in globals_of(function)]
    roots += [content_of(cell) for function in functions for cell in function.__closure__ or ()]
    return State([*roots, *_by_identity(template)]).generators


def _by_identity(part: Any) -> list[Any]:
    if type(part) is ById:
        return [part.value]
    return [item for inner in part for item in _by_identity(inner)] if type(part) is tuple else []


def _may_hide(item: Any) -> bool:
    """Returns whether Python cannot look into an object: its class, or one above, is not written in Python."""
    if isinstance(item, _BOUND):
        return _may_hide(item.__self__)
    if isinstance(item, functools.partial):
        return any(map(_may_hide, _given_to(item)))
    if isinstance(item, _SEEN_THROUGH) or type(item).__module__.startswith("torch."):
        return False
    return not all(map(_is_written_in_python, type(item).__mro__[:-1]))


def _given_to(function: functools.partial[Any]) -> list[Any]:
    return [function.func, *function.args, *function.keywords.values()]


def _is_written_in_python(cls: type) -> bool:
    is_heap_type = bool(cls.__flags__ & (1 << 9))
    return is_heap_type and not isinstance(cls.__dict__.get("__new__"), types.BuiltinFunctionType)


def _copied(item: Any) -> Any:
    """Returns a copy; the object itself where it never changes, or where nothing could stand for it (a lock, a file).

    Raises:
        LeakError: It can be moved on, and there can be no copy.
    """
    if isinstance(item, _BOUND):
        if _copied(item.__self__) is item.__self__:
            return item
        raise LeakError(f"it holds a method of a {type(item.__self__).__name__}")
    if isinstance(item, functools.partial):
        for part in filter(_may_hide, _given_to(item)):
            if _copied(part) is not part:
                raise LeakError(f"it holds a function that is given a {type(part).__name__}")
        return item
    try:
        return copy.deepcopy(item)
    except Exception as error:  # the object's own code
        if hasattr(item, "__next__"):
            raise LeakError(f"it holds a {type(item).__name__}, of which there can be no copy") from error
        return item


def _state_of(item: Any) -> bytes:
    try:
        return pickle.dumps(item)
    except Exception as error:  # the object's own code
        raise LeakError(f"it holds a {type(item).__name__} that cannot be looked into") from error


def _held_at(each: Hidden) -> Any:
    if isinstance(each.table, (list, deque)):
        return each.table[each.key] if each.key < len(each.table) else None
    return each.table.get(each.key)

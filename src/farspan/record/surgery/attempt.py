"""A call of a container that may have to be called again as one unit: what its first attempt changes is put back."""

from __future__ import annotations

import functools
import types
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from farspan.call.side_effects.attributes import own_attributes, put_own_attributes
from farspan.call.side_effects.reachable import State, is_same

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = ["Attempt", "begin_attempt", "past_attempts"]

_FIRST_CALLS = 3
_NAMES = frozenset(
    ["grad", "vjp", "jvp", "jacrev", "jacfwd", "jacobian", "hessian", "vmap", "linearize", "functional_call"]
)
"""Names in code that may need its module as one unit; it only saves noting what all other containers hold. Where one of
those turns out to need it after its first calls, that is an error: nobody knows what the attempt has changed.
"""
_num_calls: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
"""By id: modules may compare as they like."""
past_attempts: set[int] = set()
"""Ids of modules of which no call is an attempt any more."""
_is_named: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def begin_attempt(recorder: Recording, module: nn.Module) -> Attempt | None:
    """Note what `module`, a container that is about to be called, may change; None after its first calls, if its class
    does not look as if it could need one unit.
    """
    known, number = _num_calls.get(id(module), (None, 0))
    if known is None or known() is not module:
        known, number = weakref.ref(module, functools.partial(_forget, id(module))), 0
    if number < _FIRST_CALLS:
        _num_calls[id(module)] = (known, number + 1)
    elif not _names_gradients(type(module)):
        past_attempts.add(id(module))
        return None
    return Attempt(recorder, module)


class Attempt:
    """What the modules of a container hold before it is called, and where the generators stand."""

    def __init__(self, recorder: Recording, module: nn.Module) -> None:
        self._bring_generators_back = recorder.draws.mark()
        self._before = [(part, own_attributes(part)) for part in module.modules()]
        self._state = State(item for _, held in self._before for item in held.values())

    def has_changed(self) -> bool:
        """Returns whether the modules hold other attributes by now, or other things in their objects."""
        for part, held in self._before:
            now = own_attributes(part)
            if now.keys() != held.keys() or not all(is_same(item, held[name]) for name, item in now.items()):
                return True
        return bool(self._state.changed())

    def undo(self) -> None:
        """Let all be as it was."""
        self._bring_generators_back()
        for part, held in self._before:
            put_own_attributes(part, held)
        self._state.put_back(self._state.changed())


def _forget(module_id: int, _: Any) -> None:
    _num_calls.pop(module_id, None)
    past_attempts.discard(module_id)


def _names_gradients(cls: type) -> bool:
    known = _is_named.get(cls)
    if known is None:
        functions = [item for base in cls.__mro__ if base is not nn.Module for item in vars(base).values()]
        known = _is_named[cls] = any(_names_in(getattr(item, "__code__", None)) for item in functions)
    return known


def _names_in(code: Any) -> bool:
    if not isinstance(code, types.CodeType):
        return False
    return not _NAMES.isdisjoint(code.co_names) or any(map(_names_in, code.co_consts))

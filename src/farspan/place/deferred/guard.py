"""Tensors without data, as the program uses them: while it constructs, and before the model has been distributed.

in `with deferred_init():`   plain tensors; what reads memory past torch's operations (numpy) fills it first
after it                     a class of their own: the first use that needs data fills what it uses, for good
after distribute             plain tensors again
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from farspan.execute.process.world import num_ranks_to_be, rank_to_be
from farspan.outputs import write_line
from farspan.place.deferred.construction import CONSTRUCTION
from farspan.place.deferred.memory import View, mapped
from farspan.torch_private import (
    NEW_PARAMETER,
    PAST_OPERATIONS,
    WITHOUT_DATA,
    DisableTorchFunctionSubclass,
    chooses_by_modes,
    innermost,
    is_wrapped,
    without_any_mode,
)

__all__ = ["PlainReads", "guard", "guard_all", "is_constructing", "set_constructing", "unguarded"]

_Tensor: Any = torch.Tensor
_NEW_PARAMETER: Any = NEW_PARAMETER.__code__
_MOST_FRAMES = 8
_USED_EARLY = """\
farspan: parameters of a model built in farspan.deferred_init() are used before farspan.distribute(model): every process
  makes and holds those. Do it in the `with`, where it is deferred, too; or after distribute.
"""

_said: list[bool] = []
_thread = threading.local()


def is_constructing() -> bool:
    """Returns whether this thread is in a constructor that is deferred."""
    return getattr(_thread, "is_constructing", False)


def set_constructing(value: bool) -> None:
    """Enters or leaves such a constructor in this thread."""
    _thread.is_constructing = value


class PlainReads(TorchFunctionMode):
    """Fills memory before a constructor looks at it past torch's operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PAST_OPERATIONS:
            _fill(args)  # printing among them: it reads lists inside, where no mode is on
        elif func is _Tensor.tolist:
            if is_wrapped(args[0]):
                _fill(args)
            view = CONSTRUCTION.view_of(args[0])
            if view is not None:
                with without_any_mode():
                    return CONSTRUCTION.contents([view])[0].tolist()
        elif chooses_by_modes(func, args, kwargs or {}) and not _is_for_gradients((args, kwargs)):
            args, kwargs = mapped((args, kwargs or {}), _with_data)
            with without_any_mode():
                return func(*args, **kwargs)
        elif func is _Tensor.__deepcopy__:
            view = CONSTRUCTION.view_of(args[0])
            if view is not None:
                return _deep_copy(args[0], view, *args[1:])
        return func(*args, **(kwargs or {}))


def _is_for_gradients(arguments: Any) -> bool:
    found: list[bool] = []
    mapped(arguments, lambda item: found.append(isinstance(item, torch.Tensor) and item.requires_grad))
    return torch.is_grad_enabled() and any(found)


def _with_data(item: Any) -> Any:
    """Returns a copy that holds data of what does not."""
    view = CONSTRUCTION.view_of(item) if isinstance(item, torch.Tensor) else None
    return item if view is None else CONSTRUCTION.contents([view])[0]


def _deep_copy(tensor: torch.Tensor, view: View, memo: dict[Any, Any]) -> torch.Tensor:
    """Copies as torch copies a tensor: its memory once, for all tensors in it."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol at the moment.")
    key = ("farspan", view.memory.key)
    if key not in memo:
        with without_any_mode():
            size_bytes = view.memory.size_bytes
            whole = View(view.memory, torch.uint8, (size_bytes,), (1,), 0).on(view.memory.storage)
        memo[key] = whole.clone()
    with without_any_mode(), torch.no_grad():
        found = View(view.memory, view.dtype, view.shape, view.stride, view.offset).on(memo[key].untyped_storage())
    found.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = found
    if type(tensor) is not torch.Tensor:
        found.__class__ = type(tensor)
    vars(found).update(copy.deepcopy(vars(tensor), memo))
    return found


def _fill(args: Any, *, with_sources: bool = False) -> bool:
    """Fill the memory of all tensors among some arguments; returns whether there was any to fill."""
    found: list[Any] = []

    def fill(item: Any) -> None:
        memory = CONSTRUCTION.memory_of(innermost(item)) if isinstance(item, torch.Tensor) else None
        if memory is not None:
            CONSTRUCTION.fill(memory, with_sources=with_sources)
            found.append(memory)

    _each_in(args, fill)
    return bool(found)


def _each_in(item: Any, use: Callable[[Any], None]) -> None:
    """Calls `use` with all that torch finds in arguments: lists and tuples may be of the program's own classes."""
    if isinstance(item, (list, tuple)):
        for each in item:
            _each_in(each, use)
    elif isinstance(item, dict):
        _each_in(list(item.values()), use)
    else:
        use(item)


# After the constructor.


@classmethod
def _used(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Handles the use of a tensor without data outside of a constructor."""
    kwargs = kwargs or {}
    if func not in WITHOUT_DATA and not is_constructing():
        if _fill((args, kwargs), with_sources=True):
            _say_once()
        _each_in((args, kwargs), _unguard)
    with DisableTorchFunctionSubclass():
        found = func(*args, **kwargs)
    if func is _Tensor.detach and type(args[0]) is nn.Parameter and _is_made_a_parameter(args[0]):
        found.__class__ = nn.Parameter  # it took its argument for one of another class, which detaches to the same
    return found


def _is_made_a_parameter(tensor: torch.Tensor) -> bool:
    """Returns whether `nn.Parameter(tensor)` is what detaches a tensor; modes may lie between."""
    frame: Any = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None or frame.f_code is _NEW_PARAMETER:
            return frame is not None and frame.f_locals.get("data") is tensor
        frame = frame.f_back
    return False


def _deep_copied(self: Any, memo: Any) -> Any:
    if not is_constructing():
        _fill([self], with_sources=True)
    _unguard(self)
    return copy.deepcopy(self, memo)


def _reduced(self: Any, protocol: Any) -> Any:
    _fill([self], with_sources=True)
    _unguard(self)
    return self.__reduce_ex__(protocol)


@functools.cache
def _guarded(kind: Any) -> Any:
    """Returns the class of tensors of class `kind` that have no data."""
    names = {"__torch_function__": _used, "__deepcopy__": _deep_copied, "__reduce_ex__": _reduced, "_plain": kind}
    return types.new_class(f"Deferred{kind.__name__}", (kind,), exec_body=lambda space: space.update(names))


def guard(tensor: torch.Tensor) -> None:
    """Let uses of a tensor without data be noticed."""
    kind: Any = type(tensor)
    if not hasattr(kind, "_plain"):
        tensor.__class__ = _guarded(kind)


def _unguard(item: Any) -> None:
    kind = getattr(type(item), "_plain", None) if isinstance(item, torch.Tensor) else None
    if kind is not None:
        item.__class__ = kind


def unguarded(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same tensor, uses of which are not noticed any more."""
    _unguard(tensor)
    return tensor


def guard_all() -> None:
    """Guard each tensor of this process that has no data, wherever the program keeps it."""
    if not CONSTRUCTION:
        return
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and CONSTRUCTION.memory_of(item) is not None:
            guard(item)


def _say_once() -> None:
    if num_ranks_to_be() > 1 and rank_to_be() == 0 and not _said:
        _said.append(True)
        write_line(_USED_EARLY.rstrip())

"""Says what in the program still uses a parameter that is to move: by its name in the program, and its line."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from farspan.call.leaf import Placed
from farspan.call.naming import format_where, is_users_file
from farspan.graph import Call, Value
from farspan.record.surgery.real import without_weak_references
from farspan.record.tensor import LazyTensor
from farspan.torch_private import (
    DisableTorchFunction,
    has_memory_of_its_own,
    has_other_users,
    has_weak_references,
    is_used_below,
    shares_only_with_its_base,
    tree_leaves,
)

__all__ = ["what_uses"]

_MOST = 10_000
"""Of a list that is looked through."""


def what_uses(model: nn.Module, items: Iterable[Placed]) -> str:
    """Returns what uses one of `items` of `model` on this rank, besides the model; "" if they can change places."""
    with without_weak_references(model):
        for item in items:
            if has_other_users(item.tensor) or (item.is_owned and not _is_alone(item.tensor)):
                return f"{_user_of(item, model)} still uses {item.name}, which would move"
    return ""


def _is_alone(tensor: torch.Tensor) -> bool:
    """Returns whether nothing else keeps the memory of a parameter or buffer: `torch.ones(4, 4).view(1, 4, 4)`, too."""
    return has_memory_of_its_own(tensor) or shares_only_with_its_base(tensor)


def _user_of(item: Placed, model: nn.Module) -> str:
    """Returns what uses a parameter or buffer, by the name of a variable or an attribute where that is found."""
    with DisableTorchFunction():
        for name, held in chain(_variables(sys._getframe(1)), _attributes(model)):
            is_large = isinstance(held, (list, tuple, dict)) and len(held) > _MOST  # data rather than what is kept
            for each in [] if is_large else tree_leaves(held):
                if each is not item.tensor and _is_of(each, item):
                    return name
    if has_weak_references(item.tensor):
        return "a weak reference"
    return "a graph of autograd's" if is_used_below(item.tensor) else "a tensor or an array in its memory"


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields what modules keep, and its name."""
    for prefix, module in model.named_modules():
        for name, held in [*vars(module).items(), *module._buffers.items()]:
            if name not in ("_modules", "_parameters", "_buffers"):
                yield f"{prefix and f'{prefix}.'}{name} ({type(module).__name__})", held


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yields what the program's functions that are running know by a name, their variables and attributes of these, and
    that name with the line.
    """
    while frame is not None:
        code = frame.f_code
        if is_users_file(code.co_filename):
            where = format_where((code, frame.f_lineno))
            for name, held in [*_locals(frame).items(), *frame.f_globals.items()]:
                yield f"the program's {name!r} ({where})", held
                has_own = not isinstance(held, (nn.Module, type, torch.Tensor, ModuleType))
                for attribute, value in list(getattr(held, "__dict__", {}).items()) if has_own else ():
                    yield f"the program's '{name}.{attribute}' ({where})", value
        frame = frame.f_back


def _locals(frame: FrameType) -> dict[str, Any]:
    """Returns the variables of a function that is running. Python before 3.13 keeps a copy of them with the function,
    and with that all that they stood for: not here."""
    held = frame.f_locals
    found = dict(held)
    if type(held) is dict and held is not frame.f_globals and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        held.clear()
    return found


def _is_of(held: Any, item: Placed) -> bool:
    """Returns whether something is in the memory of a parameter or buffer, or has been computed from it."""
    if isinstance(held, LazyTensor):
        if held._alias_of is item or _is_computed_from(held._value, item.name):
            return True
        held = held._value.data
    if isinstance(held, np.ndarray):
        begin = item.tensor.data_ptr() if item.is_owned else 0
        return begin <= held.ctypes.data < begin + item.meta.size_bytes
    memory = item.tensor.untyped_storage()._cdata if item.is_owned else None
    if isinstance(held, torch.UntypedStorage):
        return held._cdata == memory
    is_strided = isinstance(held, torch.Tensor) and held.layout is torch.strided
    return is_strided and held.untyped_storage()._cdata == memory


def _is_computed_from(value: Value, name: str) -> bool:
    """Returns whether a backward from a value may still come to a parameter."""
    values, seen = [value], set[Call]()
    while values:
        value = values.pop()
        call = value.call
        if value.name == name:
            return True
        if call is not None and call not in seen and call.arguments is not None:  # else it is released
            seen.add(call)
            if name in getattr(call.target, "parameter_names", ()):
                return True
            values += [each for each in call.arguments if isinstance(each, Value)]
    return False

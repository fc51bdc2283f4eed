"""Makes objects of classes, empty, and fills them, without running any code of these classes.

What is to be rebuilt may come from another rank: so no `__new__`, `__init__` or setter written in Python is called.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch

__all__ = ["is_struct", "maker_of", "new_object", "new_tuple", "note_used", "put_attribute", "used_kinds"]

_used_kinds: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes of which this rank has described an object, or that were in one."""


note_used = _used_kinds.add


def used_kinds() -> list[type]:
    """Classes that this rank's own program has used: only of these can another rank's object be made here."""
    return list(_used_kinds)


def maker_of(cls: type) -> Any:
    """Returns the `__new__` of C that makes an empty object of a class: its own code is passed over."""
    news = (vars(base).get("__new__") for base in cls.__mro__)
    return next(new for new in news if isinstance(new, types.BuiltinFunctionType))


def new_object(cls: type) -> Any:
    """Returns an object of a class without anything in it."""
    return {} if cls is dict else maker_of(cls)(cls)


def new_tuple(cls: Any, values: list[Any]) -> Any:
    """Returns a tuple of a class of its own; those of torch.return_types are made by themselves."""
    return cls(values) if is_struct(cls) else tuple.__new__(cls, values)


def is_struct(cls: Any) -> bool:
    """Returns whether `cls` is a tuple that torch itself defines in C, such as `torch.return_types.max`."""
    return vars(torch.return_types).get(cls.__name__) is cls


def put_attribute(item: Any, name: str, value: Any) -> None:
    """Set an attribute in a slot or among the attributes of the object itself, never by a property."""
    found = next((vars(base)[name] for base in type(item).__mro__ if name in vars(base)), None)
    if type(found) is types.MemberDescriptorType or not hasattr(type(found), "__set__"):
        object.__setattr__(item, name, value)
    else:
        item.__dict__[name] = value

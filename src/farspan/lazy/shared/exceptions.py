"""Exceptions that a module has raised at its owner, and that the program may catch: the same one on every rank."""

from __future__ import annotations

import json
import sys
from typing import Any

__all__ = ["can_tell_exception", "exception_from_json", "exception_to_json"]

_PLAIN = (bool, int, float, str, type(None))


def can_tell_exception(error: Exception) -> bool:
    """Whether other ranks can make the same exception: its class has a name, and its arguments are plain."""
    return _class_named(_name_of(error)) is type(error) and all(type(item) in _PLAIN for item in error.args)


def exception_to_json(error: Exception) -> bytes:
    """Write an exception that can be told."""
    return json.dumps([_name_of(error), list(error.args)]).encode()


def exception_from_json(text: bytes) -> Exception:
    """Make the exception that another rank has written."""
    name, arguments = json.loads(text)
    kind = _class_named(name)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{name}: {', '.join(map(str, arguments))}")  # the class is not loaded here
    error = kind.__new__(kind, *arguments)
    error.args = tuple(arguments)
    return error


def _name_of(error: Exception) -> str:
    return f"{type(error).__module__}:{type(error).__qualname__}"


def _class_named(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found

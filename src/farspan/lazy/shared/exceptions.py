"""Exceptions that a call has raised at its owner, and that the program may catch: the same one on every rank.

What comes from another rank is a name and plain values. The name is looked up in two tables that this rank makes by
itself: the exceptions of Python and torch, and those that the code of the very call names here. No module is asked for
a name, and nothing of the user's is called to make the exception.
"""

from __future__ import annotations

import builtins
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from farspan.graph import Call
from farspan.lazy.metadata.effects.around import code_of, content_of, globals_of
from farspan.lazy.received.checked import damaged
from farspan.lazy.received.known import in_modules

__all__ = ["exception_from_json", "exception_to_json", "told_as"]

_PLAIN = (bool, int, float, str, type(None))


def told_as(error: Exception, calls: Iterable[Call]) -> Exception:
    """The exception that all ranks raise: `error` itself if other ranks can make the same one, else one of its nearest
    class that all have, with its text.

    Args:
        error: Was raised by one of `calls`, or by their backward.
        calls: Every rank has recorded them.
    """
    is_plain = all(type(item) in _PLAIN for item in error.args)
    if is_plain and _kinds_of(calls).get(_name_of(type(error))) is type(error):
        return error
    known = _common_kinds()
    kinds = [kind for kind in type(error).__mro__ if known.get(_name_of(kind)) is kind]
    kind = next(kind for kind in kinds if kind not in _WITH_FORM)
    text = str(error) if kind is type(error) else f"{type(error).__name__}: {error}"
    found = _make(kind, [text], {})
    found.__cause__, found.__notes__ = error, list(getattr(error, "__notes__", ()))
    return found


def exception_to_json(error: Exception) -> bytes:
    """Write an exception that `told_as` has given."""
    attributes = {name: item for name, item in vars(error).items() if type(item) in _PLAIN}
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    return json.dumps([_name_of(type(error)), list(error.args), attributes, notes]).encode()


def exception_from_json(text: bytes, calls: Iterable[Call]) -> Exception:
    """Make the exception that another rank has written, which one of `calls` has raised there.

    Raises:
        RecordError: It is no such text.
    """
    name, arguments, attributes, notes = _read(text)
    kind = _kinds_of(calls).get(name)
    if kind is None or issubclass(kind, _WITH_FORM):  # the rank's code is not the same
        return RuntimeError(f"{name}: {', '.join(map(str, arguments))}")
    error = _make(kind, arguments, attributes)
    for note in notes:
        error.add_note(str(note))
    return error


def _read(text: bytes) -> tuple[str, list[Any], dict[str, Any], list[str]]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise damaged("an exception that is no JSON") from None
    if not isinstance(document, list) or [type(part) for part in document] != [str, list, dict, list]:
        raise damaged("an exception without its parts")
    name, arguments, attributes, notes = document
    if not all(type(item) in _PLAIN for item in [*arguments, *attributes.values()]):
        raise damaged("an exception of what is no plain value")
    if not all(type(note) is str for note in notes):
        raise damaged("an exception with notes that are no texts")
    attributes.pop("__notes__", None)
    return name, arguments, attributes, notes


def _make(kind: type[Exception], arguments: Iterable[Any], attributes: Mapping[str, Any]) -> Exception:
    known = _common_kinds()
    nearest = next(base for base in kind.__mro__ if known.get(_name_of(base)) is base)
    if nearest is kind:
        error = kind(*arguments)
    else:
        error = nearest.__new__(kind, *arguments)  # the user's own `__init__` has run where it was raised
        error.args = tuple(arguments)
    vars(error).update(attributes)
    return error


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


@functools.cache
def _common_kinds() -> dict[str, type[Exception]]:
    """By name, the exceptions of Python and torch."""
    kinds: list[Any] = [item for item in vars(builtins).values() if isinstance(item, type)]
    kinds += [torch.OutOfMemoryError, torch.linalg.LinAlgError, np.linalg.LinAlgError]
    kinds += [getattr(torch, "AcceleratorError", Exception)]  # torch 2.8 and later
    return {_name_of(kind): kind for kind in kinds if issubclass(kind, Exception)}


_WITH_FORM = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError, BaseExceptionGroup, ExceptionGroup)
"""Those that take other arguments than a text."""


def _kinds_of(calls: Iterable[Call]) -> dict[str, type[Exception]]:
    """By name, what `calls` can raise, as far as their code shows: the same on every rank."""
    modules = {module: None for call in calls for module in _modules_of(call.target)}
    classes, functions = code_of([*modules])
    near: list[Any] = [item for cls in classes for item in vars(cls).values()]
    near += [item for function in functions for _, item in globals_of(function)]
    near += [content_of(cell) for function in functions for cell in function.__closure__ or ()]
    for function in functions:
        near += in_modules(function)
    named = {_name_of(item): item for item in near if isinstance(item, type) and issubclass(item, Exception)}
    return named | _common_kinds()


def _modules_of(target: Any) -> tuple[nn.Module, ...]:
    modules: tuple[nn.Module, ...] = getattr(target, "modules", ())
    return modules

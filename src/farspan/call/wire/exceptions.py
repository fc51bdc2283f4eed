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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from farspan.call.surroundings.code import code_of, content_of, globals_of
from farspan.call.wire.checked import damaged
from farspan.call.wire.known_classes import in_modules
from farspan.graph import Call

if TYPE_CHECKING:
    from farspan.call.leaf import Target

__all__ = ["exception_from_json", "exception_to_json", "sendable"]

_PLAIN = (bool, int, float, str, type(None))
_SEQUENCES: dict[str, type] = {"tuple": tuple, "list": list, "size": torch.Size}
_MOST_CAUSES = 8
"""Limit on the causes and contexts of an exception that are sent with it."""


def sendable(error: Exception, calls: Iterable[Call]) -> Exception:
    """Returns the exception that all ranks raise: `error` itself if other ranks can make the same one, else one of its
    nearest class that all have, with its text. What it was raised from is such an exception, too.

    Args:
        error: Was raised by one of `calls`, or by their backward.
        calls: Every rank has recorded them.
    """
    return _sendable(error, _kinds_of(calls), _MOST_CAUSES)


def _sendable(error: Exception, kinds: Mapping[str, type[Exception]], most_causes: int) -> Exception:
    is_named = kinds.get(_name_of(type(error))) is type(error)
    if isinstance(error, ExceptionGroup):
        parts = [_sendable(part, kinds, most_causes) for part in error.exceptions]
        found = error if is_named and parts == [*error.exceptions] else ExceptionGroup(error.message, parts)
    elif is_named and all(map(_is_plain, error.args)):
        found = error
    else:
        known = _common_kinds()
        near = [kind for kind in type(error).__mro__ if known.get(_name_of(kind)) is kind]
        kind = next(kind for kind in near if kind not in _WITH_FORM)
        found = _make(kind, [str(error) if kind is type(error) else f"{type(error).__name__}: {error}"], {})
    cause, context = (
        _sendable(other, kinds, most_causes - 1) if isinstance(other, Exception) and most_causes else None
        for other in (error.__cause__, error.__context__)
    )
    if found is not error:
        for note in getattr(error, "__notes__", ()):
            found.add_note(note)
        found.__traceback__ = error.__traceback__
    _chain(found, cause, context, is_hidden=error.__suppress_context__)
    return found


def _chain(error: Exception, cause: Exception | None, context: Exception | None, *, is_hidden: bool) -> None:
    error.__cause__, error.__context__ = cause, context
    error.__suppress_context__ = is_hidden  # setting the cause has changed it


def exception_to_json(error: Exception) -> bytes:
    """Write an exception that `told_as` has given."""
    return json.dumps(_document_of(error)).encode()


def _document_of(error: BaseException | None) -> dict[str, Any] | None:
    if not isinstance(error, Exception):
        return None
    is_group = isinstance(error, ExceptionGroup)
    return {
        "name": _name_of(type(error)),
        "arguments": [error.message] if is_group else [*map(_written, error.args)],
        "parts": [_document_of(part) for part in error.exceptions] if is_group else None,
        "attributes": {name: _written(item) for name, item in vars(error).items() if _is_plain(item)},
        "notes": [str(note) for note in getattr(error, "__notes__", ())],
        "cause": _document_of(error.__cause__),
        "context": _document_of(error.__context__),
        "is_hidden": error.__suppress_context__,
    }


def _is_plain(item: Any) -> bool:
    return type(item) in _PLAIN or (type(item) in _SEQUENCES.values() and all(map(_is_plain, item)))


def _written(item: Any) -> Any:
    """Returns a plain value, or a sequence of such, for JSON."""
    for name, kind in _SEQUENCES.items():
        if type(item) is kind:
            return {name: [*map(_written, item)]}
    return item


def _read(item: Any) -> Any:
    """Returns the plain value or sequence for which `_written` has put this into JSON."""
    if not isinstance(item, dict):
        return item
    ((name, parts),) = item.items()
    return _SEQUENCES[name](map(_read, parts))


def exception_from_json(text: bytes, calls: Iterable[Call]) -> Exception:
    """Make the exception that another rank has written, which one of `calls` has raised there.

    Raises:
        RecordError: It is no such text.
    """
    try:
        document = json.loads(text)
        _check_document(document)
        return _from_document(document, _kinds_of(calls))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):  # a constructor of Python's refuses, too
        raise damaged("an exception that none has written") from None


def _check_document(document: Any) -> None:
    """Raise if a document has not what `_document_of` writes.

    Raises:
        TypeError, KeyError: It has not.
    """
    kinds: dict[str, Any] = {"name": str, "arguments": list, "attributes": dict, "notes": list, "is_hidden": bool}
    if type(document) is not dict or any(type(document[key]) is not kind for key, kind in kinds.items()):
        raise TypeError
    for item in [*document["arguments"], *document["attributes"].values()]:
        if not _is_plain(_read(item)):
            raise TypeError
    document["attributes"].pop("__notes__", None)
    parts = [] if document["parts"] is None else document["parts"]
    for part in [*parts, *(document[key] for key in ("cause", "context") if document[key] is not None)]:
        _check_document(part)


def _from_document(document: Mapping[str, Any], kinds: Mapping[str, type[Exception]]) -> Exception:
    arguments, parts = [*map(_read, document["arguments"])], document["parts"]
    kind = kinds.get(document["name"])
    if kind is None:  # the rank's code is not the same
        error = RuntimeError(f"{document['name']}: {', '.join(map(str, arguments))}")
    else:
        if parts is not None:
            arguments = [*arguments, [_from_document(part, kinds) for part in parts]]
        error = _make(kind, arguments, {name: _read(item) for name, item in document["attributes"].items()})
    for note in document["notes"]:
        error.add_note(str(note))
    cause, context = (
        None if document[key] is None else _from_document(document[key], kinds) for key in ("cause", "context")
    )
    _chain(error, cause, context, is_hidden=document["is_hidden"])
    return error


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
    """Returns by name the exceptions of Python and torch."""
    kinds: list[Any] = [item for item in vars(builtins).values() if isinstance(item, type)]
    kinds += [torch.OutOfMemoryError, torch.linalg.LinAlgError, np.linalg.LinAlgError]
    kinds += [getattr(torch, "AcceleratorError", Exception)]  # torch 2.8 and later
    return {_name_of(kind): kind for kind in kinds if issubclass(kind, Exception)}


_WITH_FORM = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError, BaseExceptionGroup, ExceptionGroup)
"""Exceptions that take other arguments than a text."""


def _kinds_of(calls: Iterable[Call]) -> dict[str, type[Exception]]:
    """Returns by name what `calls` can raise, as far as their code shows: the same on every rank."""
    modules = {module: None for call in calls for module in _modules_of(call.target)}
    classes, functions = code_of([*modules])
    near: list[Any] = [item for cls in classes for item in vars(cls).values()]
    near += [item for function in functions for _, item in globals_of(function)]
    near += [content_of(cell) for function in functions for cell in function.__closure__ or ()]
    for function in functions:
        near += in_modules(function)
    named = {_name_of(item): item for item in near if isinstance(item, type) and issubclass(item, Exception)}
    return named | _common_kinds()


def _modules_of(target: Target) -> tuple[nn.Module, ...]:
    modules: tuple[nn.Module, ...] = getattr(target, "modules", ())
    return modules

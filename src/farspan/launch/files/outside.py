"""Libraries that open files by themselves, in C++ or Rust: the path is translated where Python calls them.

A writer that is not here writes to the disk on every rank (docs/limits.md).
"""

from __future__ import annotations

import functools
import inspect
import os
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farspan.launch.rank.imports import when_imported

__all__ = ["Translate", "adapt_libraries"]

Translate = Callable[[Any, bool, bool], Any]
"""Maps a path, whether the file is written, and whether its content counts, to the path to open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A function or class that is given a path.

    Attributes:
        module: Where it is.
        name: Its name there, through a class if need be.
        position: Of the path among the arguments; that of a method has the object before it.
        writes: Whether the file is changed.
        keeps: Whether it is changed in place, rather than rewritten.
        if_set: Position of an argument that says whether the file is changed, if there is one.
        beside: Endings of files that the library puts beside this one.
    """

    module: str
    name: str
    position: int = 0
    writes: bool = False
    keeps: bool = False
    if_set: int | None = None
    beside: tuple[str, ...] = ()


_ENTRIES = (
    _Entry(module="torch._C", name="PyTorchFileWriter", writes=True),
    _Entry(module="torch._C", name="PyTorchFileReader"),
    _Entry(module="torch.storage", name="UntypedStorage.from_file", writes=True, keeps=True, if_set=1),
    _Entry(module="torch", name="from_file", writes=True, keeps=True, if_set=1),
    _Entry(module="torch._C", name="ScriptModule.save", position=1, writes=True),
    _Entry(module="torch._C", name="ScriptModule._save_for_mobile", position=1, writes=True),
    _Entry(module="torch._C", name="ScriptFunction.save", position=1, writes=True),
    _Entry(module="torch.autograd.profiler", name="_ProfilerResult.save", position=1, writes=True),
    _Entry(module="torch.jit._serialization", name="load"),
    _Entry(module="_sqlite3", name="connect", writes=True, keeps=True, beside=("-journal", "-wal", "-shm")),
    _Entry(module="safetensors._safetensors_rust", name="safe_open"),
    _Entry(module="safetensors._safetensors_rust", name="serialize_file", position=1, writes=True),
    _Entry(module="tokenizers", name="Tokenizer.save", position=1, writes=True),
    _Entry(module="tokenizers", name="Tokenizer.from_file"),
    _Entry(module="h5py.h5f", name="create", writes=True),
    _Entry(module="h5py.h5f", name="open", writes=True, keeps=True, if_set=1),
    _Entry(module="torchvision.io.image", name="write_file", writes=True),
    _Entry(module="torchvision.io.image", name="read_file"),
)


def adapt_libraries(translate: Translate) -> dict[int, Any]:
    """Translate the paths that the libraries are given, once they are loaded.

    Returns:
        For those that are loaded now, what stands in whose place, by identity: other modules may have them by name.
    """
    replaced: dict[int, Any] = {}
    for module in dict.fromkeys(entry.module for entry in _ENTRIES):
        entries = [entry for entry in _ENTRIES if entry.module == module]
        when_imported(module, functools.partial(_adapt, entries, translate, replaced))
    return dict(replaced)


def _adapt(entries: list[_Entry], translate: Translate, replaced: dict[int, Any], module: Any) -> None:
    for entry in entries:
        owner, _, name = entry.name.rpartition(".")
        holder = getattr(module, owner, None) if owner else module
        original = getattr(holder, name, None)
        if original is None:
            continue  # of another version
        is_class = isinstance(original, type) and "__init__" in vars(original)
        adapted = _adapted_class(entry, translate, original) if is_class else _adapted(entry, translate, original)
        is_static = isinstance(inspect.getattr_static(holder, name), staticmethod)
        setattr(holder, name, staticmethod(adapted) if is_static else adapted)
        replaced[id(original)] = adapted


def _adapted(entry: _Entry, translate: Translate, original: Any) -> Any:
    @functools.wraps(original, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    def function(*args: Any, **kwargs: Any) -> Any:
        return original(*_translated(entry, translate, args, kwargs), **kwargs)

    return function


def _adapted_class(entry: _Entry, translate: Translate, original: Any) -> type:
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, *_translated(entry, translate, args, kwargs), **kwargs)

    return type(original.__name__, (original,), {"__init__": initialise, "__module__": original.__module__})


def _translated(entry: _Entry, translate: Translate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    if len(args) <= entry.position:
        for name in ("filename", "database", "name", "f", "name_or_buffer"):
            if name in kwargs:
                kwargs[name] = _physical(entry, translate, kwargs[name], args, kwargs)
                break
        return args
    path = _physical(entry, translate, args[entry.position], args, kwargs)
    return (*args[: entry.position], path, *args[entry.position + 1 :])


def _physical(entry: _Entry, translate: Translate, path: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not (isinstance(path, (str, bytes)) or hasattr(path, "__fspath__")) or (
        entry.module == "_sqlite3" and path in ("", ":memory:")
    ):
        return path
    writes = entry.writes and (entry.if_set is None or (len(args) > entry.if_set and bool(args[entry.if_set])))
    if entry.module == "_sqlite3" and kwargs.get("uri") and str(path).startswith("file:"):
        parts = urllib.parse.urlsplit(str(path))
        if not parts.path or "mode=memory" in parts.query:
            return path
        physical = _with_those_beside(entry, translate, urllib.parse.unquote(parts.path), writes)
        return urllib.parse.urlunsplit(("file", "", urllib.parse.quote(str(physical)), parts.query, ""))
    return _with_those_beside(entry, translate, path, writes)


def _with_those_beside(entry: _Entry, translate: Translate, path: Any, writes: bool) -> Any:
    for ending in entry.beside:
        translate(os.fsdecode(path) + ending, writes, True)
    return translate(path, writes, entry.keeps)

"""Opens files as Python does, all through `os.open`, and lists folders as `os.scandir` does."""

from __future__ import annotations

import builtins
import io
import os
import posix
import stat
from collections.abc import Callable, Iterator
from typing import Any, Self

__all__ = ["Entries", "Replacements", "is_unnamed", "opening", "renamed", "text_of", "writes"]

Replacements = dict[tuple[Any, str], Any]
"""Functions by the module and the name under which they stand there."""

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_open = io.open
_FileIO = io.FileIO


def text_of(path: Any, dir_fd: int | None = None) -> str | None:
    """Returns a path as text, from the folder that `dir_fd` is; None for a file that is open already."""
    if path is None:
        path = "."
    if isinstance(path, int):
        return None
    text = os.fsdecode(path)
    if dir_fd is not None and not text.startswith("/"):
        text = f"{posix.readlink(f'/proc/self/fd/{dir_fd}')}/{text}"
    return text


class renamed:  # noqa: N801 - reads as a verb
    """Errors in the body name the script's own path."""

    def __init__(self, *paths: Any) -> None:
        self.paths = paths

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.filename is not None:
            error.filename = self.paths[0]
            if len(self.paths) > 1:
                error.filename2 = self.paths[1]


def is_unnamed(flags: int) -> bool:
    """Returns whether the flags make a file without a name (O_TMPFILE)."""
    return hasattr(os, "O_TMPFILE") and flags & os.O_TMPFILE == os.O_TMPFILE


def writes(flags: int) -> bool:
    """Returns whether the flags of an open allow the file to be changed or made."""
    return bool(flags & _WRITES) and not is_unnamed(flags)


def _opener(path: Any, flags: int) -> int:
    return os.open(path, flags, 0o666)


def _open_through_os(file: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
    is_ours = len(more) < 5 and named.get("opener") is None and not isinstance(file, int)
    return _open(file, mode, buffering, *more, **(named | {"opener": _opener} if is_ours else named))


class _KindOfFileIO(type(_FileIO)):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _FileIO) if cls is _FileIOThroughOs else type.__instancecheck__(cls, instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _FileIO) if cls is _FileIOThroughOs else type.__subclasscheck__(cls, subclass)


class _FileIOThroughOs(_FileIO, metaclass=_KindOfFileIO):
    def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None) -> None:
        super().__init__(file, mode, closefd, _opener if opener is None and not isinstance(file, int) else opener)


def opening() -> Replacements:
    """Return the replacements of all functions with which Python opens files."""
    return {
        (builtins, "open"): _open_through_os,
        (io, "open"): _open_through_os,
        (io, "FileIO"): _FileIOThroughOs,
    }


class _Entry:
    """An entry of a folder, with the interface of `os.DirEntry`."""

    def __init__(self, folder: Any, name: Any) -> None:
        self.name = name
        self.path: Any = os.path.join(folder, name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def inode(self) -> int:
        return os.lstat(self.path).st_ino

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path) if follow_symlinks else os.lstat(self.path)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False

    def _is(self, kind: Callable[[int], bool], follow_symlinks: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow_symlinks).st_mode)
        except FileNotFoundError:
            return False


class Entries:
    """An iterator over a folder's entries, with the interface of what `os.scandir` returns."""

    def __init__(self, folder: Any, names: list[Any]) -> None:
        folder = os.fspath("." if folder is None else folder)
        self._entries: Iterator[_Entry] = iter([_Entry(folder, name) for name in names])

    def __iter__(self) -> Entries:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())

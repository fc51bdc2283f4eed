"""Folders that say, for paths of the whole disk, what is there instead and what is not there.

    ROOT/files/home/me/out/best.pt    instead of /home/me/out/best.pt
    ROOT/gone/home/me/out/old.pt      an empty file: /home/me/out/old.pt, and all below it, is not there
    ROOT/lost/...                     an empty file: what is in files/... has the size only, not the content

Paths are canonical: absolute, without symbolic links before the last part. Only functions of `posix` are used, which
nobody replaces.
"""

from __future__ import annotations

import _thread
import errno
import os
import posix
import stat
from collections.abc import Iterable

__all__ = [
    "Layer",
    "copy",
    "exists",
    "is_directory",
    "is_link",
    "kind_of",
    "mkdirs",
    "names_in",
    "parent_of",
    "remove_all",
]

_CHUNK_BYTES = 1 << 24
_SCRATCH = ".farspan-part"
_run_folders: set[str] = set()
"""The folders made for this run, once: one that is missing has been removed, because the run is over."""


class Layer:
    """One folder that holds a rank's changes of the script's files."""

    def __init__(self, root: str) -> None:
        _run_folders.add(parent_of(root))
        self.root = root
        self.files = root + "/files"
        self._gone = root + "/gone"
        self._lost = root + "/lost"
        self._real = root + "/real"

    def path(self, path: str) -> str:
        """Returns where the layer keeps its version of `path`."""
        return self.files + path

    def is_gone(self, path: str) -> bool:
        return _is_marked(self._gone + path)

    def is_lost(self, path: str) -> bool:
        return _is_marked(self._lost + path)

    def is_real(self, path: str) -> bool:
        """Returns whether `path` was made as a temporary file or folder, and so lies on the disk itself."""
        return _is_marked(self._real + path)

    def mark_gone(self, path: str) -> None:
        _mark(self._gone + path)

    def mark_lost(self, path: str) -> None:
        _mark(self._lost + path)

    def mark_real(self, path: str) -> None:
        _mark(self._real + path)

    def forget_gone(self) -> None:
        """Forgets all removals: nothing counts as gone any more."""
        remove_all(self._gone)

    def is_touched(self, directory: str) -> bool:
        """Returns whether anything below `directory` may differ from the disk."""
        return exists(self.files + directory) or exists(self._gone + directory) or self.is_gone(directory)


def _is_marked(mark: str) -> bool:
    try:
        return not stat.S_ISDIR(posix.lstat(mark).st_mode)
    except FileNotFoundError:
        return False
    except NotADirectoryError:  # something above it is marked
        return True


def _mark(mark: str) -> None:
    if _is_marked(mark):
        return
    if exists(mark):
        remove_all(mark)
    try:
        mkdirs(parent_of(mark))
    except FileNotFoundError:  # the run is over: nobody looks any more
        return
    posix.close(posix.open(mark, posix.O_WRONLY | posix.O_CREAT, 0o600))


def parent_of(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def exists(path: str) -> bool:
    try:
        posix.lstat(path)
    except OSError:
        return False
    return True


def kind_of(path: str) -> int:
    """Returns the mode of what is there, 0 for nothing."""
    try:
        return posix.lstat(path).st_mode
    except OSError:
        return 0


def is_directory(path: str) -> bool:
    return stat.S_ISDIR(kind_of(path))


def is_link(path: str) -> bool:
    return stat.S_ISLNK(kind_of(path))


def mkdirs(path: str) -> None:
    """Make a folder and those above it.

    Raises:
        FileNotFoundError: It would be in the folder of a run that is over.
    """
    if path in _run_folders and not exists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    try:
        posix.mkdir(path, 0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        mkdirs(parent_of(path))
        mkdirs(path)


def remove_all(path: str) -> None:
    """Remove `path` and all below it, if it is there; others may do so, too."""
    try:
        if not is_directory(path):
            posix.unlink(path)
            return
        for name in posix.listdir(path):
            remove_all(f"{path}/{name}")
        posix.rmdir(path)
    except FileNotFoundError:
        pass  # somebody else has removed it


def copy(source: str, target: str, *, content: bool = True) -> None:
    """Copy a file, link or empty folder with its times and mode; without `content` a file has the size alone.

    It is there whole or not at all.
    """
    found = posix.lstat(source)
    mkdirs(parent_of(target))
    scratch = f"{target}.{posix.getpid()}.{_thread.get_ident()}{_SCRATCH}"
    if stat.S_ISLNK(found.st_mode):
        posix.symlink(posix.readlink(source), scratch)
    elif stat.S_ISDIR(found.st_mode):
        mkdirs(target)
        return
    elif stat.S_ISREG(found.st_mode):
        _copy_bytes(source, scratch, found.st_size, content)
        posix.chmod(scratch, stat.S_IMODE(found.st_mode) | 0o600)
        posix.utime(scratch, ns=(found.st_atime_ns, found.st_mtime_ns))
    else:
        raise OSError(errno.EINVAL, "neither a file nor a link nor a folder", source)
    posix.rename(scratch, target)


def _copy_bytes(source: str, target: str, size: int, content: bool) -> None:
    written = posix.open(target, posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_CLOEXEC, 0o600)
    try:
        if not content:
            posix.ftruncate(written, size)
            return
        read = posix.open(source, posix.O_RDONLY | posix.O_CLOEXEC)
        try:
            while data := posix.read(read, _CHUNK_BYTES):
                view = memoryview(data)
                while view:
                    view = view[posix.write(written, view) :]
        finally:
            posix.close(read)
    finally:
        posix.close(written)


def names_in(directory: str) -> Iterable[str]:
    """Returns the names in a folder, without what is being copied; none if it is not there."""
    try:
        return [name for name in posix.listdir(directory) if not name.endswith(_SCRATCH)]
    except (FileNotFoundError, NotADirectoryError):
        return []

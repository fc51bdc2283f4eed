"""The file operations of checkpoints, each by one name: on the disk itself, on every rank.

`farspan run` gives each rank but the first a view of its own of the files that the script changes (`launch.files`), by
standing in for the functions of `os` and `open`. A checkpoint is one folder that all ranks write, so these are the
functions below those. Tests let any of them fail.
"""

from __future__ import annotations

import errno
import fcntl
import os
import posix
import stat
from collections.abc import Generator
from contextlib import contextmanager

__all__ = [
    "close",
    "create",
    "exists",
    "free_bytes",
    "fsync",
    "fsync_folder",
    "is_at",
    "lock",
    "make_folder",
    "names_in",
    "open_to_lock",
    "open_to_read",
    "opened",
    "read_into",
    "read_small",
    "remove_tree",
    "rename",
    "rewrite",
    "size_of",
    "unlink",
    "unlock",
    "write",
    "write_small",
]

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""What a file system without locks says."""
_MOST_SMALL_BYTES = 64 * 2**20
"""Of a file that is read as a whole."""


def make_folder(path: str) -> None:
    """Make one folder.

    Raises:
        OSError: Also if it is there already.
    """
    posix.mkdir(path, 0o777)


def create(path: str) -> int:
    """Make a file that is not there yet, and open it to be written."""
    return posix.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(file: int, data: bytes | memoryview) -> None:
    """Write all of `data` where the file stands."""
    left = memoryview(data)
    while left:
        left = left[posix.write(file, left) :]


def fsync(file: int) -> None:
    posix.fsync(file)


def close(file: int) -> None:
    posix.close(file)


def fsync_folder(path: str) -> None:
    """Let the names in a folder be on the disk."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
        fsync(folder)


def rename(source: str, target: str) -> None:
    """Give a file or folder another name, at once or not at all; a file with that name is replaced."""
    posix.rename(source, target)


def unlink(path: str) -> None:
    posix.unlink(path)


def write_small(path: str, data: bytes) -> None:
    """Make a file, and let its data be on the disk."""
    file = create(path)
    try:
        write(file, data)
        fsync(file)
    finally:
        close(file)


def open_to_lock(path: str) -> int:
    """Open a file to be locked; make it where it is not there yet."""
    return posix.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def lock(file: int) -> bool | None:
    """Lock a file for this process alone, until it is unlocked or the process ends.

    Returns:
        False if another one has locked it; None where the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def unlock(file: int) -> None:
    """Unlock a file, also where a child process has it open, and close it."""
    try:
        fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        close(file)


def is_at(file: int, path: str) -> bool:
    """Returns whether an open file still has the name `path`."""
    try:
        found = posix.lstat(path)
    except FileNotFoundError:
        return False
    own = posix.fstat(file)
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


def rewrite(file: int, data: bytes) -> None:
    """Let `data` be all that is in a file, which nobody needs after a crash."""
    posix.ftruncate(file, 0)
    posix.pwrite(file, data, 0)


def open_to_read(path: str) -> int:
    """Open a regular file.

    Raises:
        OSError: Also if it is of another kind.
    """
    file = posix.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would be waited for
    if not stat.S_ISREG(posix.fstat(file).st_mode):
        posix.close(file)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return file


@contextmanager
def opened(path: str, flags: int | None = None) -> Generator[int]:
    """A file that is open in the body, to be read."""
    file = open_to_read(path) if flags is None else posix.open(path, flags | os.O_CLOEXEC)
    try:
        yield file
    finally:
        close(file)


def read_into(file: int, view: memoryview, at: int) -> int:
    """Fill `view` with what begins at byte `at`; how much there was."""
    done = 0
    while done < len(view):
        count = posix.preadv(file, [view[done:]], at + done)
        if count == 0:
            break
        done += count
    return done


def read_small(path: str) -> bytes:
    """All of a file that is small.

    Raises:
        OSError: Also if it is not.
    """
    with opened(path) as file:
        size = posix.fstat(file).st_size
        if size > _MOST_SMALL_BYTES:
            raise OSError(errno.EFBIG, f"it is larger than {_MOST_SMALL_BYTES >> 20} MiB", path)
        data = bytearray(size)
        return bytes(data[: read_into(file, memoryview(data), 0)])


def size_of(file: int) -> int:
    return posix.fstat(file).st_size


def names_in(path: str) -> list[str]:
    """Returns what is in a folder, sorted; nothing if it is not there."""
    try:
        return sorted(posix.listdir(path))
    except FileNotFoundError:
        return []


def free_bytes(path: str) -> int:
    """Returns how much may still be written to the file system of a folder."""
    found = posix.statvfs(path)
    return found.f_bavail * found.f_frsize


def exists(path: str) -> bool:
    try:
        posix.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def remove_tree(path: str) -> None:
    """Remove a folder and all that is in it, or a file, or a link: never what a link leads to. What is gone already is
    no matter."""
    try:
        if not stat.S_ISDIR(posix.lstat(path).st_mode):
            unlink(path)
            return
        for name in names_in(path):
            remove_tree(f"{path}/{name}")
        posix.rmdir(path)
    except FileNotFoundError:
        return

"""Brings what a rank has written for itself to where the script says that it lies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import posix
import stat

from farspan.launch.files.layers import Layer, copy, is_directory, is_link, kind_of, names_in, remove_all

__all__ = ["bring"]


def bring(own: Layer) -> None:
    """Put all files of a layer in their places, and remove what it says is gone; files that are open stay open.

    What the lost rank had written there is replaced: the script's files are then those of one process, this one.

    Raises:
        OSError: The disk fails.
    """
    opened = _open_files(own.files)
    _remove_gone(f"{own.root}/gone", "")
    _bring(own.files, "", opened)
    remove_all(f"{own.root}/gone")
    folder = posix.getcwd()
    if folder.startswith(own.files):
        posix.chdir(folder[len(own.files) :] or "/")


def _bring(source: str, target: str, opened: dict[str, list[int]]) -> None:
    if is_directory(source):
        if target and not is_directory(target):
            if kind_of(target):
                remove_all(target)
            posix.mkdir(target, stat.S_IMODE(kind_of(source)))
        for name in names_in(source):
            _bring(f"{source}/{name}", f"{target}/{name}", opened)
        return
    if is_directory(target):
        remove_all(target)
    try:
        posix.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy(source, target)
        for number in opened.get(source, ()):
            _reopen(number, target)
        posix.unlink(source)


def _remove_gone(marks: str, path: str) -> None:
    for name in names_in(marks + path):
        below = f"{path}/{name}"
        if is_directory(marks + below):
            _remove_gone(marks, below)
        else:
            remove_all(below)


def _open_files(folder: str) -> dict[str, list[int]]:
    """Returns the numbers under which this process has files below a folder open, by their paths."""
    found: dict[str, list[int]] = {}
    if not os.path.isdir("/proc/self/fd"):
        return found
    for name in posix.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own, which is closed by now
            path = posix.readlink(f"/proc/self/fd/{name}")
            if path.startswith(folder) and not is_link(path):
                found.setdefault(path, []).append(int(name))
    return found


def _reopen(number: int, path: str) -> None:
    """Let a number of an open file be of another one, at the same place."""
    flags = fcntl.fcntl(number, fcntl.F_GETFL)
    opened = posix.open(path, flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC) | os.O_CLOEXEC)
    try:
        posix.lseek(opened, posix.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
        posix.dup2(opened, number, os.get_inheritable(number))
    finally:
        posix.close(opened)

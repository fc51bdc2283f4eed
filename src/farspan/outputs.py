"""What farspan writes besides the script: files, whole or not at all, and lines for people.

A file is written under a name that nobody can foretell and then renamed, so that who reads it finds the old text or
the new one. Nothing but a regular file is replaced: not a device, not what a symbolic link leads to.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import sys

from farspan.errors import FarspanError, printable

__all__ = ["keep_text", "write_line", "write_text"]

_log = logging.getLogger(__name__)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes what the user has asked for.

    Args:
        path: Of the file; its folder must be there.
        text: All that it is to contain.

    Raises:
        FarspanError: It cannot be written; what was there before still is.
    """
    try:
        _replace(os.fspath(path), text)
    except OSError as error:
        raise FarspanError(
            f"{os.fspath(path)} cannot be written.",
            why=f"{error.strerror or error}.",
            hint="another file, in a folder that is there and may be written to",
        ) from None


def keep_text(path: str | os.PathLike[str], text: str, what: str) -> bool:
    """Writes what is of use later, but not what the program is for: where that fails, a warning says so.

    Args:
        path: Of the file; folders are made.
        text: All that it is to contain.
        what: What it is, for people: "the report".

    Returns:
        Whether it is written.
    """
    try:
        folder = os.path.dirname(os.fspath(path))
        if folder:
            os.makedirs(folder, exist_ok=True)
        _replace(os.fspath(path), text)
    except OSError as error:
        _log.warning("%s is not kept: %s: %s", what, os.fspath(path), error.strerror or error)
        return False
    return True


def write_line(text: str) -> None:
    """Writes a line to standard error. That nobody reads it, or that its disk is full, is no reason to end."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the program has closed it
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()


def _replace(path: str, text: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and stat.S_ISCHR(mode):
        _write(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK), text)
        return
    if mode is not None and not stat.S_ISREG(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "no file"
        raise OSError(errno.EINVAL, f"it is {kind}, which is not replaced")
    part = f"{path}.{secrets.token_hex(8)}.part"
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        if mode is not None:
            os.chmod(part, stat.S_IMODE(mode))
        _write(file, text)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _write(file: int, text: str) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)

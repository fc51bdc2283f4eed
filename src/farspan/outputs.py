"""Writes all outputs but the script's own: files, whole or not at all, and lines for people.

A file is written under a name that nobody can foretell and then renamed, so that who reads it finds the old text or
the new one. Nothing but a regular file is replaced: not a device, not what a symbolic link leads to. What goes to
/dev/null goes nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import sys
import textwrap
from collections.abc import Mapping, Sequence

from farspan.errors import FarspanError, printable

__all__ = ["check_outputs", "keep_text", "marked", "write_json", "write_line", "write_output", "write_text"]

_log = logging.getLogger(__name__)
_MARKS = ("farspan: ", "farspan run: ")
"""What begins each line of farspan's on the console."""


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
        raise _refused(path, error) from None


def check_outputs(outputs: Mapping[str, str | os.PathLike[str] | None], inputs: Sequence[str | None] = ()) -> None:
    """Refuses, before a long search, files that could not be written after it; leaves nothing behind.

    Args:
        outputs: By option the file that is to be written; None where the option was not given.
        inputs: Files that are read, and so must not be written.

    Raises:
        FarspanError: A file cannot be written, or is to be written twice, or is one that is read.
    """
    known = {os.path.realpath(path): "it is read" for path in inputs if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        try:
            _replace(os.fspath(path), None)
        except (OSError, ValueError) as error:
            raise _refused(f"{option} {os.fspath(path)}", error) from None
        where = os.path.realpath(path)
        if where in known and where != os.devnull:
            raise FarspanError(
                f"{option} {os.fspath(path)} cannot be written.",
                why=f"{known[where]} by the same command.",
                hint=f"another file for {option}",
            )
        known[where] = f"{option} writes it"


def write_output(text: str) -> None:
    """Writes lines for people to standard output, without what would control a terminal or has no place there.

    Raises:
        FarspanError: They cannot be written.
        BrokenPipeError: Nobody reads it any more.
    """
    _write_stdout(printable(text))


def write_json(value: object) -> None:
    """Writes a value for programs to standard output, as a line of JSON.

    Raises:
        FarspanError: It cannot be written.
        BrokenPipeError: Nobody reads it any more.
    """
    _write_stdout(json.dumps(value).replace("\x7f", "\\u007f"))


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
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        _log.warning("%s is not kept: %s: %s", what, os.fspath(path), getattr(error, "strerror", None) or error)
        return False
    return True


def write_line(text: str) -> None:
    """Writes a line to standard error. That nobody reads it, or that its disk is full, is no reason to end."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the program has closed it
        sys.stderr.write(f"{_line_end()}{printable(text)}\n")
        sys.stderr.flush()


def marked(text: str) -> str:
    """Returns what farspan says amid the program's own lines: its first line says who speaks, further ones are
    indented.

    Example:
        >>> print(marked("2 stages\\nstage  where"))
        farspan: 2 stages
          stage  where
        >>> marked("farspan: all groups train on the same batches")
        'farspan: all groups train on the same batches'
    """
    first, end, rest = text.partition("\n")
    if not first.startswith(_MARKS):
        first = f"{_MARKS[0]}{first}"
    if not all(line.startswith("  ") for line in rest.splitlines()):
        rest = textwrap.indent(rest, "  ")
    return f"{first}{end}{rest}"


def _line_end() -> str:
    """Returns what ends the line that a bar of tqdm's leaves open on standard error; "" where there is none."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    files = [getattr(bar, "fp", None) for bar in list(getattr(tqdm, "_instances", ()))]
    return "\n" if any(getattr(file, "_wrapped", file) is sys.stderr for file in files) else ""


def _write_stdout(text: str) -> None:
    stream = sys.stdout
    if stream is None:  # the program was started without one
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except OSError as error:
        with contextlib.suppress(OSError):  # or Python would complain at its end, about what is left in the stream
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise _refused("standard output", error) from None


def _refused(what: str | os.PathLike[str], error: OSError | ValueError) -> FarspanError:
    return FarspanError(
        f"{os.fspath(what)} cannot be written.",
        why=f"{getattr(error, 'strerror', None) or error}.",
        hint="another file, in a folder that is there and may be written to",
    )


def _replace(path: str, text: str | None) -> None:
    """Writes a file whole; None looks whether that can be done."""
    if path == os.devnull:
        return
    if not path:
        raise OSError(errno.ENOENT, "its name is empty")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise OSError(errno.EINVAL, f"it is {kind}, which is not replaced")
    part = f"{path}.{os.urandom(8).hex()}.part"
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        if mode is not None:
            os.chmod(part, stat.S_IMODE(mode))
        with open(file, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text or "")
        if text is not None:
            os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)

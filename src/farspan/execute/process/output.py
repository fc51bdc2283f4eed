"""Leaves the console to rank 0 where the launcher gives it to all ranks: torchrun, srun, mpirun.

    rank 0    as it was
    rank 1    stdout and stderr to /tmp/farspan-.../rank1.log, from `farspan.distribute` on; the error that ends it to
              the console too

A rank that has a file of its own already (torchrun --redirects, srun --output=%t.log) keeps it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from farspan import settings
from farspan.errors import FarspanError
from farspan.launch.rank_process import open_log
from farspan.outputs import write_line

__all__ = ["keep_output_apart", "return_to_console"]

_log = logging.getLogger(__name__)
_STREAMS = (1, 2)
_consoles: list[int] = []
"""What standard output and standard error of this process were before."""


def keep_output_apart(rank: int, gather: Callable[[bytes], list[bytes]]) -> None:
    """Let what ranks other than 0 print go to a file for each of them, unless FARSPAN_OUTPUT says "all".

    Args:
        rank: Of this process, among all.
        gather: Gives what all ranks contribute to one question, by rank.

    Raises:
        LaunchError: The setting is no choice.
    """
    is_kept = settings.choice("OUTPUT", settings.OUTPUTS, default="first") == "first" and os.name == "posix"
    own = {"host": socket.gethostname(), "file": _file_of(1), "is_kept": is_kept}
    own["folder"] = os.path.join(tempfile.gettempdir(), f"farspan-{secrets.token_hex(8)}") if rank == 0 else ""
    found: list[dict[str, Any]] = [json.loads(blob) for blob in gather(json.dumps(own).encode())]
    first = found[0]
    logging_ranks = [
        number for number, each in enumerate(found) if number and each["is_kept"] and not _is_apart(each, first)
    ]
    if not first["is_kept"] or not logging_ranks:
        return
    if rank == 0:
        whose = f"rank {logging_ranks[0]} is" if len(logging_ranks) == 1 else "the other ranks is"
        name = f"rank{logging_ranks[0]}.log" if len(logging_ranks) == 1 else "rank*.log"
        where = "" if all(each["host"] == first["host"] for each in found) else " of its host"
        write_line(
            f"farspan: the output of {whose} in {first['folder']}/{name}{where}; FARSPAN_OUTPUT=all shows it here"
        )
    elif rank in logging_ranks and not _consoles:
        try:
            _redirect(Path(first["folder"]) / f"rank{rank}.log")
        except (OSError, FarspanError) as error:
            _log.warning("farspan: rank %d prints to the console: %s", rank, error)


def return_to_console() -> None:
    """Let this rank write to its standard output and error again: it fails, and people should see why."""
    _flush()
    with contextlib.suppress(OSError):
        for console, stream in zip(_consoles, _STREAMS, strict=False):
            os.dup2(console, stream)


def _file_of(stream: int) -> list[int]:
    """Returns device and number of the regular file that a stream goes to; [] where it goes to something else."""
    try:
        found = os.fstat(stream)
    except OSError:  # closed
        return []
    return [found.st_dev, found.st_ino] if stat.S_ISREG(found.st_mode) else []


def _is_apart(each: dict[str, Any], first: dict[str, Any]) -> bool:
    """Returns whether the output of a rank goes to a file that is not rank 0's."""
    return bool(each["file"]) and (each["host"] != first["host"] or each["file"] != first["file"])


def _redirect(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path.parent, 0o700)
    found = os.lstat(path.parent)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{path.parent} is not a folder of ours")
    log = open_log(path)
    _flush()
    _consoles.extend(map(os.dup, _STREAMS))
    for stream in _STREAMS:
        os.dup2(log, stream)
    os.close(log)
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))
        return_to_console()
        previous(kind, error, trace)

    sys.excepthook = report


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, full, or none
            stream.flush()

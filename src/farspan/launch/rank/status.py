"""How far each rank of a run is: a record of fixed size in the folder of the run's logs.

A rank writes over it after each training step, and `farspan top` reads it.
"""

from __future__ import annotations

import json
import os
import posix  # a rank's own view of files (`launch/files`) does not reach it
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["RankStatus", "StatusFile", "read_statuses"]

_BYTES = 512
_PREFIX, _SUFFIX = "rank", ".status"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """What a rank has said after its last training step."""

    rank: int
    pid: int
    step: int
    """How many training steps it has ended."""
    ended_s: float
    """When it ended the last one, on the host's monotonic clock."""
    period_s: float
    """Seconds from the end of the step before to the end of the last one; 0 after the first."""
    compute_s: float
    """Seconds of the last step in which it computed."""
    wait_s: float
    """Seconds of the last step in which it waited for messages of other ranks."""
    micro_batches: int


_KINDS = {field.name: int if field.type == "int" else float for field in fields(RankStatus)}


class StatusFile:
    """The record of this rank.

    Args:
        folder: Of the run's logs.
        rank: Its number in the run.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        self._rank = rank
        self._ended_s = 0.0
        path = f"{os.fspath(folder)}/{_PREFIX}{rank}{_SUFFIX}"
        self._file = posix.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def write(self, *, step: int, compute_s: float, wait_s: float, micro_batches: int) -> None:
        """Says that training step number `step`, from 1, has ended.

        Raises:
            OSError: It cannot be written.
        """
        now = time.monotonic()
        status = RankStatus(
            rank=self._rank,
            pid=os.getpid(),
            step=step,
            ended_s=now,
            period_s=now - self._ended_s if self._ended_s else 0.0,
            compute_s=compute_s,
            wait_s=wait_s,
            micro_batches=micro_batches,
        )
        self._ended_s = now
        posix.pwrite(self._file, json.dumps(asdict(status)).encode().ljust(_BYTES), 0)


def read_statuses(folder: str | os.PathLike[str]) -> list[RankStatus]:
    """Returns what the ranks of a run on this host have said last, by rank; a record that is being written is left out.

    Raises:
        OSError: The folder cannot be read.
    """
    found: list[RankStatus] = []
    for path in Path(folder).iterdir():
        if path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX):
            status = _parsed(path.read_bytes())
            if status is not None:
                found.append(status)
    return sorted(found, key=lambda status: status.rank)


def _parsed(data: bytes) -> RankStatus | None:
    try:
        record: dict[str, Any] = json.loads(data)
        return RankStatus(**record) if {name: type(item) for name, item in record.items()} == _KINDS else None
    except (ValueError, AttributeError):  # it is being written, or is nothing of ours
        return None

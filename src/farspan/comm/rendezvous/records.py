"""Records that the ranks leave for each other in the store before there is a side channel, and the wait for them.

A record is a JSON object. One with "error" was left by a rank that failed, one with "absent" by a rank whose program
ended before it came to the rendezvous: who reads either raises.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from farspan.comm.rendezvous.group import Peers
from farspan.control.text import as_error, clip_head, described, name_ranks
from farspan.errors import DeadlineError, LaunchError, RemoteError
from farspan.launch.rank.error_file import is_of_another_rank, leave_error
from farspan.launch.rank.notes import has_ended
from farspan.outputs import write_line

__all__ = ["Record", "Records", "absence"]

Record = dict[str, Any]

_EVERY_RANK = "let every rank call farspan.distribute, or none"
_LONGEST_S = 1e6
_HEARD_S = 3.0
"""How long rank 0 stays, after it has failed, for the others to read why."""
_LONG_S = 30.0
"""A wait of this length or more is worth a line."""


class Records:
    """The records of one job, as one rank writes and reads them.

    Args:
        peers: This rank among the others.
        limit_s: How long all reading together may take.
    """

    def __init__(self, peers: Peers, limit_s: float) -> None:
        self._peers = peers
        self._limit_s = limit_s
        self._until = time.monotonic() + limit_s
        self._has_warned = False

    def write(self, key: str, record: Record) -> None:
        """Leaves a record."""
        self._peers.store.set(key, json.dumps(record))

    @contextlib.contextmanager
    def leaving_errors(self, key: str) -> Iterator[None]:
        """Leaves what goes wrong inside under `key`, for the ranks that read it, and raises it."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the store is gone too: the first error is the cause
                self.write(key, {"error": described(error)})
                leave_error(error, is_heard=is_of_another_rank(error))  # torchrun may end this process while it stays
                self._stay_until_heard()
            raise

    def _stay_until_heard(self) -> None:
        """Rank 0 may host the store: what it has left is lost with it, unless the ranks that have come have read it."""
        if self._peers.rank or self._peers.launcher == "run":
            return
        missing = self._missing()
        others = [rank for rank in range(1, self._peers.world_size) if rank not in missing]
        if others:
            self._peers.store.wait([f"heard {rank}" for rank in others], timedelta(seconds=_HEARD_S))

    def _has_heard(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: nobody waits for that
            self.write(f"heard {self._peers.rank}", {})

    def read(self, key: str, rank: int) -> Record:
        """Waits for a record.

        Args:
            key: Its name.
            rank: Who writes it.

        Raises:
            RemoteError: That rank has failed, or has ended without having come here.
            DeadlineError: It has not come in time.
            LaunchError: The store does not answer, or holds something else.
        """
        if has_ended(rank) and not self._peers.store.check([key]):
            raise _absent(rank, "its program is over")
        try:
            text = self._text_of(key)
        except dist.DistNetworkError as error:
            raise LaunchError(
                f"rank {self._peers.rank} has lost the store by which the ranks find each other.",
                why=str(error).splitlines()[0] + "\nwho hosts it, rank 0 or the launcher, has probably ended.",
                hint="look at what rank 0 and the launcher wrote last",
            ) from None
        record = _parse(key, text)
        if "absent" in record:
            raise _absent(rank, str(record["absent"]))
        if "error" in record:
            self._has_heard()
            raise _failed(rank, record["error"])
        return record

    def _text_of(self, key: str) -> bytes:
        try:
            self._wait_for(key)
        except TimeoutError:
            error = self._late()
            self._has_heard()
            raise error from None
        text: bytes = self._peers.store.get(key)
        return text

    def _wait_for(self, key: str) -> None:
        left_s = max(0.001, min(self._until - time.monotonic(), _LONGEST_S))
        if left_s > _LONG_S and not self._has_warned:
            try:
                self._wait(key, _LONG_S)
                return
            except TimeoutError:
                self._has_warned = True
                rank, missing = self._peers.rank, self._missing()
                if missing:
                    write_line(f"farspan: rank {rank} waits for {name_ranks(missing)} to call farspan.distribute")
                left_s -= _LONG_S
        self._wait(key, left_s)

    def _wait(self, key: str, limit_s: float) -> None:
        """Return when the record is there.

        Raises:
            TimeoutError: It has not come in time.
        """
        try:
            self._peers.store.wait([key], timedelta(seconds=limit_s))
        except dist.DistNetworkError:
            raise
        except RuntimeError as error:  # of a TCPStore a DistStoreError, of a FileStore no more than this
            if not isinstance(error, dist.DistStoreError) and "timeout" not in str(error):
                raise
            raise TimeoutError from None

    def _missing(self) -> list[int]:
        """Returns the ranks that have not come."""
        return [rank for rank in range(self._peers.world_size) if not self._peers.store.check([f"rank {rank}"])]

    def _late(self) -> DeadlineError:
        """Returns the error that names the ranks that have not come, whoever it was that this rank waited for."""
        rank, missing = self._peers.rank, self._missing()
        what = f"rank {rank} waited {self._limit_s:g} s for "
        if not missing:
            return DeadlineError(
                f"{what}the other ranks to connect to each other",
                why="all have called farspan.distribute; one of them is stopped, or cannot reach rank 0.",
                hint="look where the ranks are: py-spy dump --pid PID",
            )
        verb = "has" if len(missing) == 1 else "have"
        return DeadlineError(
            f"{what}{name_ranks(missing)} to call farspan.distribute",
            why=f"{name_ranks(missing)} {verb} not come to it: not started, stopped, or still busy before it.",
            hint=f"{_EVERY_RANK}; if it only takes longer: FARSPAN_DEADLINE={2 * self._limit_s:g}",
        )


def absence(why: str) -> Record:
    """Returns the record of a rank that will not come."""
    return {"absent": why}


def _absent(rank: int, why: str) -> RemoteError:
    error = RemoteError(f"rank {rank} ended before it called farspan.distribute", why=why, hint=_EVERY_RANK)
    error.rank = rank
    return error


def _failed(rank: int, texts: Any) -> Exception:
    if not isinstance(texts, dict):
        return _nonsense("error", texts)
    named = {name: str(texts.get(name, "")) for name in ("what", "why", "hint", "traceback")}
    named["what"] = f"rank {rank} failed: {named['what']}"
    return as_error({"kind": "RemoteError", "rank": rank, **named})


def _parse(key: str, text: bytes) -> Record:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        raise _nonsense(key, text) from None
    if not isinstance(record, dict):
        raise _nonsense(key, text)
    return record


def _nonsense(key: str, text: object) -> LaunchError:
    return LaunchError(
        f"the store of this job holds something else under {key!r} than farspan writes.",
        why=clip_head(repr(text), 200),
        hint="is another program using the same MASTER_ADDR and MASTER_PORT?",
    )

"""The all-gathers that one rank takes part in: what is under way, and what has come and is yet to be asked for."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farspan.control.tree.blocks import MAX_PARTS_BYTES, parts_by_rank
from farspan.errors import DivergenceError

if TYPE_CHECKING:
    from farspan.control.link import Link
    from farspan.control.wire import Frame

__all__ = ["Gather", "Gathers"]

_MAX_KEY = 1_000


@dataclass(slots=True)
class Gather:
    """One all-gather.

    Attributes:
        blobs: All ranks' parts, by rank, once they are there.
        void: Why it can never be complete; "" while it can.
        forgotten: Nobody will ask for the result.
    """

    blobs: list[bytes] | None = None
    void: str = ""
    forgotten: bool = False

    def is_over(self) -> bool:
        return self.blobs is not None or bool(self.void)

    def result(self, key: str, rank: int) -> list[bytes]:
        """Returns all parts, by rank.

        Raises:
            DivergenceError: A rank has ended its program without giving one.
        """
        if self.blobs is None:
            hint = "make every rank run the same number of steps"
            raise DivergenceError(self.void, why=f"rank {rank} waits for all parts of {key!r}", hint=hint)
        return list(self.blobs)


class Gathers:
    """The all-gathers of one rank.

    Args:
        rank: Which one.
        world_size: How many give a part.
        link: Where this rank's parts go.
        condition: Held while anything here changes, notified when a result has come.
    """

    def __init__(self, rank: int, world_size: int, link: Link, condition: threading.Condition) -> None:
        self._rank = rank
        self._world_size = world_size
        self._link = link
        self._condition = condition
        self._by_key: dict[str, Gather] = {}
        self._to_forget: deque[str] = deque()
        """Gathers that nobody will ask for, as finalizers have noted."""

    def contribute(self, key: str, payload: bytes, receiver: int | None = None) -> None:
        if len(payload) > MAX_PARTS_BYTES or len(key) > _MAX_KEY:
            raise ValueError(f"{len(payload)} bytes for a gather, named {key[:80]!r}")
        with self._condition:
            while self._to_forget:
                self._forget(self._to_forget.popleft())
            if key in self._by_key:
                raise ValueError(f"{key!r} was contributed before")
            if receiver in (None, self._rank):
                self._by_key[key] = Gather()
        header = {"t": "contribute", "key": key}
        self._link.send(header if receiver is None else {**header, "for": receiver}, payload)

    def find(self, key: str) -> Gather:
        with self._condition:
            gather = self._by_key.get(key)
        if gather is None or gather.forgotten:
            raise ValueError(f"{key!r} was not contributed here, or has been forgotten")
        return gather

    def forget(self, key: str) -> None:
        with self._condition:
            self._forget(key)

    def forget_later(self, key: str) -> None:
        """Takes no lock.

        Python's garbage collector runs finalizers in whichever thread happens to allocate something: where ranks are
        threads, in one that holds another rank's lock, while that rank's thread runs a finalizer that wants ours.
        """
        self._to_forget.append(key)

    def on_frame(self, frame: Frame) -> bool:
        """Takes the frame if it is one of ours; the condition is held, and notified by the caller."""
        if frame.header.get("t") not in ("gathered", "void"):
            return False
        key = frame.header["key"]
        gather = self._by_key.get(key)
        if gather is None or gather.forgotten:
            self._by_key.pop(key, None)
        elif frame.header["t"] == "void":
            gather.void = frame.header["what"]
        else:
            gather.blobs = parts_by_rank(frame.payload, self._world_size)
        return True

    def _forget(self, key: str) -> None:
        gather = self._by_key.get(key)
        if gather is None:
            return
        if gather.is_over():
            del self._by_key[key]
        else:
            gather.forgotten = True

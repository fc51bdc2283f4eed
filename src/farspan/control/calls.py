"""Questions from rank to rank through the hub, with answers of any size.

    asker                            hub                     answerer
      request id, body       ------> passes on ------>       handler(body) in a worker thread
      reply, size, 1 MiB     <------            <------      first part
      part, at, 1 MiB        <------            <------      more parts ...
      ack                    ------>            ------>      ... of which at most 8 are under way unacknowledged

So a large answer never sits in the hub as a whole, other messages slip in between its parts, and it is received
straight into the buffer that the asker gets.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farspan.control.text import described
from farspan.control.wire import ProtocolError, as_bytes_view
from farspan.errors import RemoteError

if TYPE_CHECKING:
    from farspan.control.link import Link
    from farspan.control.wire import Buffer, Frame, Header

__all__ = ["Calls", "Handler"]

Handler = Callable[[dict[str, Any]], tuple[dict[str, Any], Any]]
"""A question to its answer and the payload of the answer: any contiguous buffer."""

PART_BYTES = 1 << 20
WINDOW_BYTES = 8 * PART_BYTES
_MOST_BYTES = 1 << 44
"""Of one answer."""


@dataclass(slots=True)
class _Question:
    """One that this rank has asked."""

    rank: int
    body: dict[str, Any] | None = None
    payload: bytearray | None = None
    missing_bytes: int = 0
    error: Header | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or (self.body is not None and not self.missing_bytes)


@dataclass(slots=True)
class _Transfer:
    """An answer that this rank is sending."""

    unacknowledged_bytes: int = 0
    cancelled: bool = False


class Calls:
    """Both sides of the questions of one rank.

    Args:
        rank: This rank.
        link: To the hub.
        condition: The channel's; guards everything here.
        wait: The channel's: (predicate, deadline_s) -> whether it came true; raises on failure; holds `condition`.
    """

    def __init__(
        self, rank: int, link: Link, condition: threading.Condition, wait: Callable[[Callable[[], bool], float], bool]
    ) -> None:
        self._rank = rank
        self._link = link
        self._condition = condition
        self._wait = wait
        self._handler: Handler | None = None
        self._workers = _Workers(f"farspan-side-{rank}-answer")
        self._ids = itertools.count()
        self._questions: dict[int, _Question] = {}
        self._transfers: dict[tuple[int, int], _Transfer] = {}
        self._ended: set[int] = set()

    def serve(self, handler: Handler) -> None:
        with self._condition:
            self._handler = handler
            self._condition.notify_all()

    def stop(self, deadline_s: float) -> None:
        """Answer nothing more; returns when nothing is being answered, or at the deadline."""
        self._workers.stop(deadline_s)

    # -- asking -------------------------------------------------------------------------------------------------------

    def ask(self, rank: int, body: dict[str, Any], deadline_s: float) -> tuple[dict[str, Any], bytearray] | None:
        """The answer, or None where the deadline passed."""
        if rank == self._rank:
            if self._handler is None:
                raise RuntimeError("this rank asked itself, but serve() has not been called")
            answer, payload = self._handler(body)
            return answer, bytearray(as_bytes_view(payload))
        with self._condition:
            self._wait(lambda: True, 0)  # Raises if this rank has failed or closed.
            self._raise_if_ended(rank)
            number = next(self._ids)
            question = self._questions[number] = _Question(rank)
        try:
            self._link.send({"t": "request", "to": rank, "id": number, "body": body})
            with self._condition:
                if not self._wait(lambda: question.done or rank in self._ended, deadline_s):
                    return None
                if not question.done:
                    self._raise_if_ended(rank)
        finally:
            with self._condition:
                del self._questions[number]
        if question.error is not None:
            raise _as_error(rank, question.error)
        assert question.body is not None
        return question.body, question.payload if question.payload is not None else bytearray()

    def _raise_if_ended(self, rank: int) -> None:
        if rank in self._ended:
            raise _ended_error(rank)

    def place(self, header: Header, size: int) -> bytearray | memoryview:
        """Where a payload is to be received: in the asker's own buffer."""
        if header.get("t") not in ("reply", "part"):
            return bytearray(size)
        with self._condition:
            question = self._questions.get(header["id"])
            if question is None or question.rank != header["from"]:
                return bytearray(size)
            if question.payload is None:
                size_bytes = header["size"]
                if type(size_bytes) is not int or not 0 <= size_bytes <= _MOST_BYTES:
                    raise ProtocolError(f"an answer of {str(size_bytes)[:40]} bytes")
                question.payload = bytearray(size_bytes)
                question.missing_bytes = size_bytes
            at = header["at"]
            if type(at) is not int or not 0 <= at <= at + size <= len(question.payload):
                raise ProtocolError(f"part {at}+{size} of an answer of {len(question.payload)} bytes")
            return memoryview(question.payload)[at : at + size]

    # -- what the listener hears --------------------------------------------------------------------------------------

    def on_ended(self, rank: int) -> None:
        with self._condition:
            self._ended.add(rank)
            for (asker, _), transfer in self._transfers.items():
                if asker == rank:
                    transfer.cancelled = True
            self._condition.notify_all()

    def on_frame(self, frame: Frame) -> bool:
        """Takes the frame if it is one of ours."""
        header = frame.header
        kind = header.get("t")
        if kind == "request":
            self._workers.submit(lambda: self._answer(header["from"], header["id"], header["body"]))
        elif kind in ("reply", "part"):
            self._on_part(header, frame.payload)
        elif kind in ("ack", "cancel"):
            with self._condition:
                transfer = self._transfers.get((header["from"], header["id"]))
                if transfer is not None:
                    transfer.unacknowledged_bytes -= header.get("bytes", 0)
                    transfer.cancelled |= kind == "cancel"
                    self._condition.notify_all()
        else:
            return False
        return True

    def _on_part(self, header: Header, payload: Buffer) -> None:
        size = len(payload)
        if isinstance(payload, memoryview):
            payload.release()  # Else the asker could not resize its bytearray.
        number, sender = header["id"], header["from"]
        with self._condition:
            question = self._questions.get(number)
            wanted = question is not None and question.rank == sender
            if question is not None and wanted:
                question.error = header.get("error")
                question.missing_bytes -= size
                if header["t"] == "reply":
                    question.body = header.get("body")
                if question.done:
                    self._condition.notify_all()
        if not wanted:
            self._link.send({"t": "cancel", "to": sender, "id": number})
        elif size:
            self._link.send({"t": "ack", "to": sender, "id": number, "bytes": size})

    # -- answering, in a worker thread --------------------------------------------------------------------------------

    def _answer(self, asker: int, number: int, body: dict[str, Any]) -> None:
        try:
            with self._condition:
                self._wait(lambda: self._handler is not None, float("inf"))
                handler = self._handler
            assert handler is not None
            answer, payload = handler(body)
            view = as_bytes_view(payload)
            first = {"t": "reply", "to": asker, "id": number, "at": 0, "size": len(view), "body": answer}
            self._send_parts(asker, number, first, view)
        except BaseException as error:
            reply = {"t": "reply", "to": asker, "id": number, "at": 0, "size": 0}
            self._link.send({**reply, "error": described(error)})

    def _send_parts(self, asker: int, number: int, first: Header, view: memoryview) -> None:
        with self._condition:
            transfer = self._transfers[asker, number] = _Transfer(cancelled=asker in self._ended)
        try:
            for at in range(0, max(len(view), 1), PART_BYTES):
                part = view[at : at + PART_BYTES]
                with self._condition:
                    self._wait(lambda: transfer.cancelled or transfer.unacknowledged_bytes < WINDOW_BYTES, float("inf"))
                    if transfer.cancelled:
                        return
                    transfer.unacknowledged_bytes += len(part)
                more = {"t": "part", "to": asker, "id": number, "at": at}
                self._link.send(more if at else first, part)
        finally:
            with self._condition:
                del self._transfers[asker, number]


class _Workers:
    """Daemon threads, one per question being answered, reused: a blocked one delays neither others nor the exit.

    (A ThreadPoolExecutor joins its threads when the interpreter ends: one blocked handler would keep the process.)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_idle = 0
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def submit(self, job: Callable[[], None]) -> None:
        """Runs `job`, which must not raise, in a thread of its own."""
        with self._lock:
            if self._stopped:
                return
            if self._num_idle:
                self._num_idle -= 1
            else:
                name = f"{self._name}-{len(self._threads) + 1}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()
            self._jobs.put(job)

    def stop(self, deadline_s: float) -> None:
        """Idle threads end now, busy ones after their job: one that is still in torch when the interpreter ends, aborts
        the process. Who waits longer than the deadline, waits in Python, where that does no harm.
        """
        with self._lock:
            self._stopped = True
            for _ in self._threads:
                self._jobs.put(None)
        until = time.monotonic() + deadline_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # It must not keep the last answer's payload alive while idle.
            with self._lock:
                self._num_idle += 1


def _as_error(rank: int, text: Header) -> RemoteError:
    error = RemoteError(
        f"rank {rank} could not answer: {text['what']}",
        why=text["why"],
        hint=text["hint"] or f"`remote_traceback` of this error is rank {rank}'s traceback",
    )
    error.rank, error.remote_traceback = rank, text["traceback"]
    return error


def _ended_error(rank: int) -> RemoteError:
    error = RemoteError(
        f"rank {rank} has ended its program and cannot answer any more",
        why="this rank reads a value that lives there",
        hint="read it before that rank ends, or keep that rank until all have finished",
    )
    error.rank = rank
    return error

"""One rank's end of all pulls: it asks other ranks for tensors, and answers what they ask."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch

from farspan.comm.pulls.answers import read_answer, send_request
from farspan.comm.pulls.listener import Answering, Handler, Listener, StreamListener, service_of, shut_down
from farspan.control.channel import SideChannel
from farspan.control.hub.joining import Client, join
from farspan.control.text import answer_error, clip_head
from farspan.control.wire import FrameReader, Header, ProtocolError
from farspan.control.workers import Workers
from farspan.errors import DeadlineError, LaunchError, RemoteError

__all__ = ["Pulling", "Pulls"]

_CAUSE_S = 5.0
"""How long a broken connection waits for the news of why it broke."""
_ENDING_S = 5.0
"""How long `close` may take to see each thread idle."""
_MOST_IDLE = 32
"""Connections that are kept for the next question; the one that was used longest ago goes when one more comes."""

_Connection = tuple[Any, FrameReader]
"""A socket or a stream, and its reader."""
_Received = tuple[Header, list[torch.Tensor]]
"""The head of an answer, and its tensors."""


class Pulling:
    """What is pulled in a thread, while the program goes on.

    Args:
        pulls: This rank's end.
        rank: That is asked.
        request: The question.
    """

    def __init__(self, pulls: Pulls, rank: int, request: dict[str, Any]) -> None:
        self._pulls, self._rank, self._request = pulls, rank, request
        self._answer: Future[_Received] = Future()

    def run(self) -> None:
        """Asks, and keeps the answer or the error for whoever waits for it."""
        try:
            self._answer.set_result(self._pulls.asked(self._rank, self._request))
        except BaseException as error:
            self._answer.set_exception(error)

    def wait(self) -> _Received:
        """Returns what `pull` returns; raises what it raises."""
        with self._pulls.waiting_for(self._rank, self._request):
            return self._answer.result()  # who asks has a deadline


class Pulls:
    """One rank's end of all pulls.

    Args:
        side: Its side channel: knows the other ranks, and why one does not answer.
        handler: Answers the other ranks.
        deadline_s: How long an answer may be silent.
    """

    def __init__(self, side: SideChannel, handler: Handler, deadline_s: float) -> None:
        self._side = side
        self._handler = handler
        self._deadline_s = min(deadline_s, threading.TIMEOUT_MAX)
        self._lock = threading.Lock()
        self._listener: Listener | None = None
        self._answering: Answering | None = None if side.streams is None else StreamListener(side, handler)
        self._addresses: dict[int, tuple[str, int]] = {}
        self._sockets: set[Any] = set()
        """The open connections to the owners that this rank reads from."""
        self._idle: dict[int, _Connection] = {}
        """For each owner the connection that no read is using now."""
        self._is_over = False
        self._workers = Workers(f"farspan-pulls-{side.rank}-ahead")
        side.on_close = self.close

    @property
    def num_answered(self) -> int:
        """How many questions of other ranks have been answered."""
        return 0 if self._answering is None else self._answering.num_answered

    def listen(self) -> dict[str, Any]:
        """Returns where other ranks find this one's tensors: the answer to `{"listen": True}` on the side channel."""
        with self._lock:
            if self._is_over:
                raise RuntimeError("this rank has ended")
            if self._listener is None:
                self._answering = self._listener = Listener(self._side, self._handler)
            return {"address": self._listener.address}

    def pull(
        self, rank: int, request: dict[str, Any], memory: torch.Tensor | None = None
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Asks a rank; what its handler answers, each tensor with memory of its own, or the only one in `memory`.

        Raises:
            RemoteError: The handler raised, or that rank has ended, failed or died.
            DeadlineError: It has said nothing for so long.
            DivergenceError: The ranks' programs differ.
            LaunchError: It cannot be reached.
        """

        with self.waiting_for(rank, request):
            return self.asked(rank, request, memory)

    def begin(self, rank: int, request: dict[str, Any]) -> Pulling:
        """Pulls in a thread; the program waits for it when it needs the answer."""
        self._find(rank)  # here, for that is a wait of the program
        pulling = Pulling(self, rank, request)
        if not self._workers.submit(pulling.run):
            pulling.run()  # this rank has ended, and the answer says so
        return pulling

    def waiting_for(self, rank: int, request: dict[str, Any]) -> AbstractContextManager[None]:
        """Notes that the program waits for an answer, while the `with` block runs."""
        return self._side.waits.until(lambda: _to_do(request), {"rank": rank})

    def asked(
        self, rank: int, request: dict[str, Any], memory: torch.Tensor | None = None
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """As `pull`, where it is noted elsewhere that somebody waits."""
        self._side.raise_if_ended(rank)
        try:
            head, tensors = self._ask(rank, request, memory)
        except (TimeoutError, DeadlineError):
            late = self._side.late.describe(self._deadline_s, _to_do(request), {"rank": rank})
            self._side.check(rank, 0)
            raise late from None
        except (EOFError, OSError, ProtocolError, LaunchError) as error:
            self._side.check(rank, _CAUSE_S)
            raise error if isinstance(error, LaunchError) else _broken(rank, error) from None
        if "error" in head:
            raise answer_error(rank, head["error"])
        return head["body"], tensors

    def abort(self) -> None:
        """Ends all that is under way, and all that comes later; from any thread."""
        with self._lock:
            self._is_over = True
            sockets, answering = list(self._sockets), self._answering
        for sock in sockets:
            shut_down(sock)
        if answering is not None:
            answering.shut()

    def close(self) -> None:
        """Closes, and returns when no thread does anything here any more, or after a few seconds."""
        self.abort()
        if self._answering is not None:
            self._answering.stop(_ENDING_S)
        self._workers.stop(_ENDING_S)
        with self._lock:
            idle, self._idle = list(self._idle.values()), {}
        for sock, _ in idle:
            self._drop(sock)

    def _ask(self, rank: int, request: dict[str, Any], memory: torch.Tensor | None) -> _Received:
        with self._lock:
            idle = self._idle.pop(rank, None)
        if idle is not None:
            try:
                return self._converse(rank, idle, request, memory)
            except (EOFError, ConnectionError):
                pass  # the owner closes connections that are idle; if it has died, nobody listens there
        return self._converse(rank, self._connect(rank), request, memory)

    def _connect(self, rank: int) -> _Connection:
        if self._side.streams is not None:
            return self._register(self._side.streams.connect(rank)), FrameReader()
        self._find(rank)
        side = self._side
        client = Client(side.rank, side.world_size, side.secret, rank, service_of(rank))
        opened: list[Any] = []
        try:
            return join(
                client, self._addresses[rank], self._deadline_s, lambda sock: opened.append(self._register(sock))
            )
        except BaseException:
            for sock in opened:
                self._drop(sock)
            raise

    def _find(self, rank: int) -> None:
        """Learns where a rank listens, where there are no streams."""
        if self._side.streams is None and rank not in self._addresses:
            host, port = self._side.request(rank, {"listen": True}, self._deadline_s)["address"]
            self._addresses[rank] = str(host), int(port)

    def _register(self, sock: Any) -> Any:
        with self._lock:
            if self._is_over:
                raise ConnectionError("aborted")
            self._sockets.add(sock)
        return sock

    def _converse(
        self, rank: int, connection: _Connection, request: dict[str, Any], memory: torch.Tensor | None
    ) -> tuple[Header, list[torch.Tensor]]:
        sock, reader = connection
        try:
            sock.settimeout(self._deadline_s)
            send_request(sock, request)
            answer = read_answer(sock, reader, memory)
        except BaseException:  # what may still come over it belongs to nobody
            self._drop(sock)
            raise
        self._keep(rank, connection)
        return answer

    def _keep(self, rank: int, connection: _Connection) -> None:
        with self._lock:
            released = [self._idle.pop(rank, None)]
            self._idle[rank] = connection
            if len(self._idle) > _MOST_IDLE:
                released.append(self._idle.pop(next(iter(self._idle))))
        for each in released:
            if each is not None:
                self._drop(each[0])

    def _drop(self, sock: Any) -> None:
        with self._lock:
            self._sockets.discard(sock)
        sock.close()


def _to_do(request: dict[str, Any]) -> str:
    return f"to answer {clip_head(json.dumps(request), 120)}"


def _broken(rank: int, error: BaseException) -> RemoteError:
    found = RemoteError(
        f"rank {rank} has broken off what it was answering",
        why=f"{type(error).__name__}: {error}",
        hint=f"look at rank {rank}'s log",
    )
    found.rank = rank
    return found

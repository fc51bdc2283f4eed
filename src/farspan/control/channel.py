"""One rank's end of the side channel: it agrees on a step, gathers small values, asks other ranks, spreads failures.

All methods are thread-safe. Waits sleep on one condition that the listener thread notifies; none polls.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from farspan.control.gathers import Gathers
from farspan.control.hub.divergence import NO_END, ProgramEnd, history_to_json
from farspan.control.hub.server import HubServer
from farspan.control.late import LateRanks
from farspan.control.link import Link, LoopLink, Server, connect
from farspan.control.requests import Calls
from farspan.control.text import as_error, clip_head, described, fresh, is_answering, stack_of
from farspan.control.tree.numbers import host_of
from farspan.control.waits import Waits
from farspan.errors import FarspanError
from farspan.outputs import write_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farspan.control.hub.divergence import Entry
    from farspan.control.requests import Handler
    from farspan.control.wire import Frame, Header

__all__ = ["SideChannel"]

_log = logging.getLogger(__name__)
_WAKE_S = 0.5
"""How often a rank that has failed lets stopped ranks go on while the hub does not answer."""
_ENDING_S = 5.0
"""How long `fail` may take to see its news on their way, and `close` to see each of this channel's threads idle."""


class SideChannel:
    """One rank's end of the side channel; made by `connect` or `alone`.

    Attributes:
        rank, world_size, secret: Which rank of how many this is, and what they know and nobody else.
        history: Set by the caller: for a step, the (digest, description) of what was recorded, in order, each with what
            to try if it differs or without. Called in the listener thread when the programs differ; must not block.
        raised: Set by the caller: an error of its program (`text.described`) which may be why the programs differ.
        failure: The first failure of another rank, else None.
        has_told: Whether it has been raised in the thread of the program.
        waits: What this rank's program waits for. A wait of half a minute becomes a line on rank 0's standard error.
        place: Set by the caller: says in a line where this rank is in its schedule. Called in the listener thread.
        late: Says who is late, and where they are.
        address, streams: Of this host, at which the other ranks reach it; what opens streams where there is none.
        wake: Set by the caller: lets processes of other ranks go on that are stopped, so that they hear of a failure.
        on_failure: Called once, in the listener thread, with the first failure. One that came before it was set is
            not repeated: look at `failure` after setting it.
        on_close: Called by `close`.

    Example:
        >>> channel = SideChannel.alone()
        >>> channel.start(0, digest=0xBEEF)
        >>> channel.wait_agreed(0, deadline_s=60)
        >>> channel.contribute("loss", b"3.14")
        >>> channel.gathered("loss", deadline_s=60)
        [b'3.14']
        >>> channel.close(linger_s=0)
    """

    def __init__(
        self, rank: int, world_size: int, link: Link, server: Server | None = None, *, secret: str = ""
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.history: Callable[[int], Sequence[Entry]] | None = None
        self.raised: Header | None = None
        self.failure: FarspanError | None = None
        self.has_told = self._all_finished = self._fail_noted = self._closed = False
        self.on_failure: Callable[[FarspanError], None] = lambda error: None
        self._has_lost_hub = False
        self.on_close: Callable[[], None] = lambda: None
        self.address, self.streams = link.address, link.streams
        self.secret = secret
        self.place: Callable[[], str] = lambda: ""
        self.wake: Callable[[], None] = lambda: None
        self._link = link
        self._server = server
        self._condition = threading.Condition()
        self._calls = Calls(rank, link, self._condition, functools.partial(self._wait, is_question=True))
        self._started: int | None = None
        self._agreed: int | None = None
        self._gathers = Gathers(rank, world_size, link, self._condition)
        self._ids = itertools.count()
        self._answers: dict[int, Header | None] = {}
        """Answers to the questions that this rank has asked about others, by number; None before they come."""
        self._thread = threading.get_ident()
        """The one that runs the program."""
        self._failing = threading.Lock()
        """Held while `on_failure` is called."""
        self._own_failure = ""
        self.waits = Waits()
        self.late = LateRanks(rank, world_size, self._ask)
        link.listen(self._on_frame, self._on_end, self._on_turn)

    host = staticmethod(HubServer.open)

    @staticmethod
    def connect(
        rank: int,
        world_size: int,
        address: tuple[str, int],
        secret: str,
        deadline_s: float,
        *,
        server: HubServer | None = None,
    ) -> SideChannel:
        """Connects a rank to its host; who is that itself passes its `server`, which `close` waits for, and ends.

        Raises:
            LaunchError, DeadlineError: The hub cannot be reached, or refuses; it does not answer in time.
        """
        link = connect(rank, world_size, address, secret, deadline_s, host=host_of(rank, world_size))
        return SideChannel(rank, world_size, link, server, secret=secret)

    @staticmethod
    def alone() -> SideChannel:
        """World size 1: the same calls, without sockets or threads."""
        return SideChannel(0, 1, LoopLink())

    # -- agreement ----------------------------------------------------------------------------------------------------

    def start(self, step: int, digest: int, data: tuple[int, ...] = ()) -> None:
        """Says that this rank begins flush number `step`, having recorded a program of this digest. Does not wait.

        Args:
            step: Larger than those before.
            digest: Must be equal on all ranks.
            data: Digests of data that the program is given, of which one must be equal on all ranks.
        """
        with self._condition:
            if self._started is not None and step <= self._started:
                raise ValueError(f"step {step} begun after step {self._started}")
            self._started = step
        self._link.send({"t": "start", "step": step, "digest": digest, "data": data})

    def wait_agreed(self, step: int, deadline_s: float) -> None:
        """Waits until every rank has begun `step` with the same digest.

        Raises:
            DivergenceError: The ranks' programs differ.
            RemoteError: Another rank failed or died.
            DeadlineError: Some rank did not begin the step in time.
        """
        with self._condition:
            if self._started is None or step > self._started:
                raise ValueError(f"wait for step {step}, which this rank has not begun")
        self._wait_for_others(lambda: self._has_agreed(step), deadline_s, f"to begin step {step}", {"step": step})

    def _has_agreed(self, step: int) -> bool:
        return self._agreed is not None and self._agreed >= step

    # -- gathers ------------------------------------------------------------------------------------------------------

    def contribute(self, key: str, payload: bytes, *, receiver: int | None = None) -> None:
        """Gives this rank's part of the gather `key`. Does not wait.

        Args:
            key: Each once.
            payload: All ranks' parts together are small (63 MiB at most), though one may be much longer than others.
            receiver: The only rank that will ask for all parts; None where all may. The same on every rank.
        """
        self._gathers.contribute(key, payload, receiver)

    def gathered(self, key: str, deadline_s: float) -> list[bytes]:
        """Waits for all ranks' parts of `key`, by rank. The result is kept until `forget`.

        Raises:
            DivergenceError: A rank has ended its program without giving a part.
            RemoteError, DeadlineError: As in `wait_agreed`.
        """
        gather = self._gathers.find(key)
        self._wait_for_others(gather.is_over, deadline_s, f"to give their part of {key!r}", {"key": key})
        return gather.result(key, self.rank)

    def forget(self, key: str) -> None:
        """Drops the result of `key`, also one that is still to come."""
        self._gathers.forget(key)

    def forget_later(self, key: str) -> None:
        """Drops the result of `key` when this rank contributes to another one; may be called by a finalizer."""
        self._gathers.forget_later(key)

    # -- questions ----------------------------------------------------------------------------------------------------

    def serve(self, handler: Handler) -> None:
        """Answers the other ranks' requests from now on, those that came before too.

        Args:
            handler: From a request to its answer. Runs in a daemon thread per request, so it may block; what it raises
                is raised at the asker as RemoteError.
        """
        self._calls.serve(handler)

    def request(self, rank: int, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Asks a rank; what its handler answers, both at most 1 MiB of JSON. To oneself: calls the handler here.

        Raises:
            RemoteError: The handler raised, or that rank has ended, failed or died.
            DeadlineError, DivergenceError: As in `wait_agreed`.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"there is no rank {rank} among {self.world_size}")
        to_do = f"to answer {clip_head(json.dumps(request), 120)}"
        with self.waits.until(lambda: to_do, {"rank": rank}):
            answer = self._calls.ask(rank, request, deadline_s)
        if answer is None:
            late = self.late.describe(deadline_s, to_do, {"rank": rank})
            self.check(rank, 0)
            raise late
        return answer

    @property
    def may_ask(self) -> bool:
        """Whether other ranks still answer this one: none has failed, or one whose program has raised, and this is rank
        0: they stay for a while, so that what it prints, or writes into a file, is whole."""
        return self.failure is None or (self.rank == 0 and is_answering(self.failure))

    def raise_if_ended(self, rank: int) -> None:
        """Raises if `rank` has said goodbye, or a rank that has failed answers nothing any more."""
        if not self.may_ask:
            self.check(rank, 0)
        with self._condition:
            self._calls.raise_if_ended(rank)

    def wait_ended(self, rank: int, patience_s: float) -> bool:
        """Returns whether `rank` ends in that time, or this rank's connection does."""
        with self._condition:
            return self._condition.wait_for(lambda: self._calls.has_ended(rank) or self._has_lost_hub, patience_s)

    def check(self, rank: int, patience_s: float) -> None:
        """Raises why `rank` does not answer, if that becomes known in time: some rank has failed, or that one ended."""
        with self._condition:
            self._wait(lambda: self._calls.has_ended(rank), patience_s)
            self._calls.raise_if_ended(rank)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tells all other ranks that this one raised. Returns when the hub has sent it on (or after 5 s)."""
        with self._condition:
            if self._own_failure or self._closed:
                return
            self._own_failure = str(error) or type(error).__name__
            self._condition.notify_all()
        self.wake()
        self._link.send({"t": "fail", **described(error)})
        until = time.monotonic() + _ENDING_S
        while not self._link.is_listener() and time.monotonic() < until:
            with self._condition:
                if self._condition.wait_for(lambda: self._fail_noted or self._closed, _WAKE_S):
                    return
            self.wake()  # it may have been stopped only now

    def finish(self, deadline_s: float, digest: int = 0, end: ProgramEnd = NO_END) -> None:
        """Says that this rank's program is over, and goes on answering requests until all ranks have said so.

        Without it, a rank that reads from another after that one has left gets an error.

        Args:
            deadline_s: How long it goes on at most.
            digest: Of what the program has done since its last step; must be equal on all ranks.
            end: Where it has ended, which others are told that wait for this rank.

        Raises:
            DivergenceError: Another rank begins a step, for which it would wait for ever, or has another digest.
            RemoteError, DeadlineError: As in `wait_agreed`.
        """
        step = 0 if self._started is None else self._started + 1
        self._link.send({"t": "finish", "step": step, "digest": digest, "end": end.to_header()})
        self._wait_for_others(lambda: self._all_finished, deadline_s, "to end their programs", {})

    def close(self, linger_s: float) -> None:
        """Says goodbye. A rank in whose process the hub or a relay is waits until all below have done so or died, or
        know of a failure: what they do meanwhile may take as long as it likes.

        Args:
            linger_s: How long such a rank waits at most; ranks that still run then get a failure.
        """
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._condition.notify_all()
        self._link.send({"t": "bye"})
        self._link.finish()
        self.on_close()
        self._calls.stop(_ENDING_S)
        if not self._link.is_listener() and self._failing.acquire(timeout=_ENDING_S):
            self._failing.release()
        if self._server is not None:
            if not self._server.wait_ended(linger_s):
                _log.info("rank %d ends after lingering for %g s; other ranks still run", self.rank, linger_s)
            self._server.stop()

    def _wait(
        self, ready: Callable[[], bool], deadline_s: float, *, is_enough: bool = False, is_question: bool = False
    ) -> bool:
        """Waits, holding the condition; returns whether it came true in time. Raises the failure at once, whatever is
        ready; unless `is_enough`, where what has come before the failure is returned; or `is_question`, if this
        rank still `may_ask`.
        """

        def is_stopped() -> bool:
            is_failed = not self.may_ask if is_question else self.failure is not None
            return is_failed or bool(self._own_failure) or self._closed

        with contextlib.nullcontext() if ready() else self._link.waiting():
            self._condition.wait_for(lambda: is_stopped() or ready(), min(deadline_s, threading.TIMEOUT_MAX))
        if is_enough and self._has_come(ready):
            return True
        if not is_question or is_stopped():
            self._raise_if_stopped()
        return ready()

    def _raise_if_stopped(self) -> None:
        if self.failure is not None:
            self.has_told |= threading.get_ident() == self._thread
            raise fresh(self.failure)
        if self._own_failure:
            raise FarspanError("this rank has failed before", why=self._own_failure)
        if self._closed:
            raise RuntimeError("the side channel has been closed")

    def _wait_for_others(self, ready: Callable[[], bool], deadline_s: float, to_do: str, about: Header) -> None:
        """Waits until it comes true; else raises who is late with what, and where they are.

        Args:
            ready: What to wait for.
            deadline_s: How long.
            to_do: What the others have not done: "to begin step 3".
            about: What the hub is asked of them: whose step, whose part of a gather.
        """
        with self.waits.until(lambda: to_do, about), self._condition:
            if self._wait(ready, deadline_s, is_enough=True):
                return
        late = self.late.describe(deadline_s, to_do, about)
        with self._condition:
            if not self._wait(ready, 0, is_enough=True):
                raise late

    def _has_come(self, ready: Callable[[], bool]) -> bool:
        """Returns whether it is true, though another rank may have failed since: that one has seen it too, and its
        program has gone on and may have printed it; so this rank's may."""
        return not self._own_failure and not self._closed and ready()

    def _ask(self, question: Header, patience_s: float) -> Header | None:
        """Returns what the hub, or another rank's listener, answers at once; None if it does not."""
        with self._condition:
            number = next(self._ids)
            self._answers[number] = None
        self._link.send({**question, "id": number})
        with self._condition:
            try:
                self._wait(lambda: self._answers[number] is not None, patience_s)
            finally:
                answer = self._answers.pop(number)
        return answer

    def _on_frame(self, frame: Frame) -> None:
        header = frame.header
        kind = header.get("t")
        if self._calls.on_frame(frame):
            return
        if kind == "history":
            self._show_history(header)
            return
        if kind == "failure":
            self._link.send({"t": "heard"})  # the rank of the hub, which may have failed, need not wait for more
            self.take_failure(as_error(header))
            return
        if kind == "ended":
            self._calls.on_ended(header["rank"])
            return
        if kind == "stack":
            place = "\n".join(filter(None, [stack_of(self._thread), self.place(), self.waits.describe()]))
            stacked = {"t": "stacked", "to": header["from"], "id": header["id"], "stack": place}
            self._link.send({**stacked, "about": self.waits.about})
            return
        if kind == "say":
            write_line(header["text"])
            return
        with self._condition:
            if self._gathers.on_frame(frame):
                pass
            elif kind == "agreed":
                self._agreed = header["step"]
            elif kind in ("status", "stacked") and header["id"] in self._answers:
                self._answers[header["id"]] = header
            elif kind == "noted":
                self._fail_noted = True
            elif kind == "finished":
                self._all_finished = True
            self._condition.notify_all()

    def _show_history(self, header: Header) -> None:
        shown = history_to_json(self.history, header["step"])
        self._link.send({"t": "history", "query": header["query"], "raised": self.raised}, shown)

    def _on_turn(self) -> None:
        late = self.waits.find_long()
        if late is not None:
            self._link.send(late)

    def _on_end(self, failure: Header) -> None:
        with self._condition:
            self._fail_noted = self._has_lost_hub = True
            self._condition.notify_all()
        self.take_failure(as_error(failure))

    def take_failure(self, error: FarspanError) -> None:
        """Takes a failure of another rank, from wherever that is known."""
        with self._failing:
            with self._condition:
                if self.failure is not None or self._own_failure or self._closed:
                    return
                self.failure = error
                self._condition.notify_all()
            try:
                self.on_failure(error)
            except Exception:
                _log.exception("on_failure raised")

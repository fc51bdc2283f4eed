"""Questions from rank to rank through the hub, and their answers: decisions and addresses, no tensors.

asker                            hub                     answerer
  request id, body       ------> passes on ------>       handler(body) in a worker thread
  reply id, body         <------            <------
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farspan.control.text import answer_error, described, ended_error
from farspan.control.workers import Workers

if TYPE_CHECKING:
    from farspan.control.link import Link
    from farspan.control.wire import Frame, Header

__all__ = ["Calls", "Handler"]

Handler = Callable[[dict[str, Any]], dict[str, Any]]
"""A question to its answer."""


@dataclass(slots=True)
class _Question:
    """A question that this rank has asked another one."""

    rank: int
    reply: Header | None = None


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
        self._workers = Workers(f"farspan-side-{rank}-answer")
        self._ids = itertools.count()
        self._questions: dict[int, _Question] = {}
        self._ended: set[int] = set()
        self._is_stopped = False

    def serve(self, handler: Handler) -> None:
        with self._condition:
            self._handler = handler
            self._condition.notify_all()

    def stop(self, deadline_s: float) -> None:
        """Answer nothing more; returns when nothing is being answered, or at the deadline."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()
        self._workers.stop(deadline_s)

    # -- asking -------------------------------------------------------------------------------------------------------

    def ask(self, rank: int, body: dict[str, Any], deadline_s: float) -> dict[str, Any] | None:
        """Returns the answer, or None where the deadline passed."""
        if rank == self._rank:
            if self._handler is None:
                raise RuntimeError("this rank asked itself, but serve() has not been called")
            return self._handler(body)
        with self._condition:
            self._wait(lambda: True, 0)  # Raises if this rank has failed or closed.
            self.raise_if_ended(rank)
            number = next(self._ids)
            question = self._questions[number] = _Question(rank)
        try:
            self._link.send({"t": "request", "to": rank, "id": number, "body": body})
            with self._condition:
                if not self._wait(lambda: question.reply is not None or rank in self._ended, deadline_s):
                    return None
                if question.reply is None:
                    raise ended_error(rank)
        finally:
            with self._condition:
                del self._questions[number]
        if "error" in question.reply:
            raise answer_error(rank, question.reply["error"])
        return question.reply["body"]

    def has_ended(self, rank: int) -> bool:
        return rank in self._ended

    def raise_if_ended(self, rank: int) -> None:
        """Raises if `rank` has said goodbye; the condition is held."""
        if rank in self._ended:
            raise ended_error(rank)

    # -- what the listener hears --------------------------------------------------------------------------------------

    def on_ended(self, rank: int) -> None:
        with self._condition:
            self._ended.add(rank)
            self._condition.notify_all()

    def on_frame(self, frame: Frame) -> bool:
        """Takes the frame if it is one of ours."""
        header = frame.header
        kind = header.get("t")
        if kind == "request":
            self._workers.submit(lambda: self._answer(header["from"], header["id"], header["body"]))
        elif kind == "reply":
            with self._condition:
                question = self._questions.get(header["id"])
                if question is not None and question.rank == header["from"]:
                    question.reply = header
                    self._condition.notify_all()
        else:
            return False
        return True

    # -- answering, in a worker thread --------------------------------------------------------------------------------

    def _answer(self, asker: int, number: int, body: dict[str, Any]) -> None:
        reply: Header = {"t": "reply", "to": asker, "id": number}
        try:
            with self._condition:
                self._condition.wait_for(lambda: self._handler is not None or self._is_stopped)
                handler = self._handler
            if handler is None:
                raise ended_error(self._rank)
            self._link.send({**reply, "body": handler(body)})
        except BaseException as error:
            self._link.send({**reply, "error": described(error)})

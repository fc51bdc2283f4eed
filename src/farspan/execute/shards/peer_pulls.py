"""What a rank of one group asks those of other groups for, at any time, and in one group alone.

All groups step together, so what is held at a point between two steps is the same thing for all who are there. Each
rank counts the steps and loads that change it: who has not come as far answers when it has, and one that has gone on
says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from farspan.comm.pulls.answers import Answer
from farspan.comm.pulls.pulls import Pulling, Pulls
from farspan.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from farspan.control.channel import SideChannel

__all__ = ["PeerPulls"]


class PeerPulls:
    """One rank's end of what ranks of different groups ask each other for.

    Args:
        everybody: The channel of all ranks.
        deadline_s: How long an answer may take.
    """

    def __init__(self, everybody: SideChannel, deadline_s: float) -> None:
        self._everybody = everybody
        self._deadline_s = deadline_s
        self._handlers: dict[str, Callable[[Any], Answer]] = {}
        self.clock = 0
        """How many steps and writes this rank has made, of those that change what is held."""
        self._is_over = False
        self._moved = threading.Condition()
        self._pulls = Pulls(everybody, self._answer, deadline_s)
        everybody.serve(lambda request: self._pulls.listen())

    def answer_with(self, handlers: Mapping[str, Callable[[Any], Answer]]) -> None:
        """Adds what is answered, by kind of request; handlers are called in threads."""
        self._handlers.update(handlers)

    def ask(self, rank: int, kind: str, what: Any) -> tuple[dict[str, Any], Sequence[torch.Tensor]]:
        """Returns what `rank`, one of all groups, has at this point of its program."""
        return self._pulls.pull(rank, {"kind": kind, "what": what, "clock": self.clock})

    def begin(self, rank: int, kind: str, what: Any) -> Pulling:
        """As `ask`, in a thread: this rank makes no step before it has waited for the answer."""
        return self._pulls.begin(rank, {"kind": kind, "what": what, "clock": self.clock})

    def advance(self) -> None:
        """Moves this rank's clock on: what it holds has changed."""
        with self._moved:
            self.clock += 1
            self._moved.notify_all()

    def abort(self) -> None:
        """Ends all that is under way; from any thread."""
        self._pulls.abort()
        with self._moved:
            self._is_over = True
            self._moved.notify_all()

    def _answer(self, request: dict[str, Any]) -> Answer:
        wanted = request["clock"]
        with self._moved:
            self._moved.wait_for(lambda: self._is_over or self.clock >= wanted, self._deadline_s)
            if self.clock != wanted:
                raise RecordError(
                    f"rank {self._everybody.rank} of all is not where the program is that asks for its shard.",
                    why=f"it has made {self.clock} steps of optimizers that are sharded, the other one {wanted}.",
                    hint="let every group step as often as the others, and read between the same steps",
                )
        return self._handlers[request["kind"]](request["what"])

"""The side channel of one group of ranks: what it agrees on concerns the group alone, what fails concerns all groups.

    a rank of this group raises       the channel of all ranks -> every rank of every group
    a rank of any group raises, dies  the channel of all ranks -> this channel -> whoever waits in it
    this group's hub finds a failure  this channel, and that of all ranks unless it says the same by itself
    a rank of another group is lost   nothing in this channel, where the run can go on without that group (`on_loss`)

Ranks are numbered from 0 in each group, and from 0 in the channel of all of them; errors that come by way of that one
name them by the number that the launcher has given them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.control.channel import SideChannel
from farspan.control.hub.divergence import NO_END, ProgramEnd
from farspan.errors import DivergenceError, FarspanError, RemoteError

if TYPE_CHECKING:
    from collections.abc import Callable

    from farspan.control.link import Link, Server

__all__ = ["GroupChannel"]

_SAID_S = 2.0
"""How long the channel of all ranks may take to report what this group's own has found: a death is seen by both."""


class GroupChannel(SideChannel):
    """One rank's end of the side channel of its group.

    Args:
        everybody: This rank's end of the channel of all groups' ranks; it has no other user that waits for failures.
        number: Of the group.
        num_groups: How many groups of equal size there are; group 0 has the first ranks, and so on.
        link: To the group's hub.
        server: The group's hub or relay, if it is in this process.
        secret: Of the group.

    Attributes:
        on_loss: Set by the caller: whether the groups that are whole can go on after this loss; then it is no failure
            here. Called in the listener thread of the channel of all ranks.
        finish_all: Set by the caller: ends the program in the channel of all ranks, given how long that may take.
    """

    def __init__(
        self,
        everybody: SideChannel,
        number: int,
        num_groups: int,
        link: Link,
        server: Server | None = None,
        *,
        secret: str,
    ) -> None:
        size = everybody.world_size // num_groups
        super().__init__(everybody.rank % size, size, link, server, secret=secret)
        self.on_loss: Callable[[RemoteError], bool] = lambda error: False
        self.finish_all: Callable[[float], None] = lambda deadline_s: self.everybody.finish(deadline_s)
        self.address = everybody.address
        self.join(everybody, number, num_groups)

    def join(self, everybody: SideChannel, number: int, num_groups: int) -> None:
        """Takes a channel of all ranks, of the start or of those that are left, and the place of this group there."""
        self.everybody = everybody
        self.number = number
        self.num_groups = num_groups
        everybody.place = lambda: self.place()
        everybody.on_failure = self._hear
        if everybody.failure is not None:
            self._hear(everybody.failure)

    def fail(self, error: BaseException) -> None:
        """Tells the ranks of all groups that this one raised."""
        with self._condition:
            if self._own_failure or self._closed:
                return
            self._own_failure = str(error) or type(error).__name__
            self._condition.notify_all()
        self.wake()
        self.everybody.fail(self._named(error))

    def finish(self, deadline_s: float, digest: int = 0, end: ProgramEnd = NO_END) -> None:
        """Says that this rank's program is over, and waits until those of all groups are."""
        super().finish(deadline_s, digest, end)
        self.finish_all(deadline_s)

    def close(self, linger_s: float) -> None:
        """Says goodbye to the group, and then to all others."""
        super().close(linger_s)
        self.everybody.close(linger_s)

    def end(self, error: FarspanError) -> None:
        """Takes from the launcher that nothing goes on; called in the thread that listens to it."""
        super().take_failure(error)

    def lose(self, error: RemoteError) -> None:
        """Takes from the launcher the loss of a rank of the channel of all; called there too."""
        self.everybody.take_failure(error)

    def _hear(self, error: FarspanError) -> None:
        """A failure that all groups hear of; called in the listener thread of the channel of all ranks."""
        if isinstance(error, RemoteError) and error.is_loss and self.on_loss(error):
            return
        rank = getattr(error, "rank", None)
        if rank is not None:  # as this group counts; -1 stands for a rank of another one
            error.rank = rank % self.world_size if rank // self.world_size == self.number else -1  # type: ignore[attr-defined]
        self.wake()
        super().take_failure(error)

    def take_failure(self, error: FarspanError) -> None:
        """A failure that this group's hub has found; called in this channel's listener thread."""
        patience_s = 0.0 if isinstance(error, DivergenceError) else _SAID_S
        everybody = self.everybody
        with everybody._condition:
            has_said = everybody._condition.wait_for(
                lambda: everybody.failure is not None or everybody._closed, patience_s
            )
        if not has_said and self.failure is None and not self._closed:
            everybody.fail(self._named(error))
        super().take_failure(error)

    def _named(self, error: BaseException) -> BaseException:
        """Returns the error, which says also how its ranks are counted."""
        if self.world_size > 1:
            words = f"farspan: in group {self.number}, whose rank 0 is rank {self.number * self.world_size} of all"
            if isinstance(error, FarspanError):
                error.why = "\n".join(filter(None, [error.why, words]))
            else:
                error.add_note(words)
        return error

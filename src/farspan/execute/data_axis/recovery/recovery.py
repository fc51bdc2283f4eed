"""Lets groups do things together so that a loss leaves all that are left with the same result, or with none.

    complete   on each rank: what it does with the others is done, and nothing has changed yet
    commit     all ranks know that all have completed it: from here on each uses the result

If a rank is lost, all that are left say how many of these operations they know to be committed, and form a new world.
If one of them knows that an operation is committed, all have completed it, and use what they have. Else none has used
anything: it is begun again among those that are left. So nobody waits for who is lost to say what it knew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from farspan.call.draws.frame import key_of
from farspan.comm.transport import TransferError
from farspan.errors import FarspanError, RemoteError
from farspan.launch.membership import CAUSE_S, ProgramsOverError

if TYPE_CHECKING:
    from farspan.control.groups.group_channel import GroupChannel
    from farspan.execute.data_axis.recovery.regroup import Regroup
    from farspan.launch.membership import Membership

__all__ = ["Recovery"]

_T = TypeVar("_T")


class Recovery:
    """The part of one rank in going on after losses.

    Args:
        membership: What the launcher says.
        channel: Of this rank's group.
        regroup: Forms the world of those that are left.
        deadline_s: The longest wait for another rank.

    Attributes:
        num_committed: The number of operations that this rank knows to be committed.
    """

    def __init__(self, membership: Membership, channel: GroupChannel, regroup: Regroup, deadline_s: float) -> None:
        self._membership = membership
        self._channel = channel
        self._regroup = regroup
        self._deadline_s = deadline_s
        self._num_begun = 0
        self.num_committed = 0
        self._digest = 0
        self._is_leaving = False
        channel.on_loss = self._hear
        channel.finish_all = self._finish
        membership.on_lost = regroup.hear
        membership.on_over = channel.end

    # Operations of all groups, in one order on all ranks.

    def begin(self, digest: int) -> None:
        """Begins an operation, which `commit` ends.

        Args:
            digest: Must be equal on all ranks.
        """
        self._num_begun += 1
        self._digest = digest
        self._start()

    def _start(self) -> None:
        self._channel.everybody.start(2 * self.num_committed, self._digest)

    def commit(self, complete: Callable[[], None], again: Callable[[], None]) -> None:
        """Ends the operation that was begun: returns when all ranks that are left have completed it.

        Args:
            complete: Does what this rank does with the others; changes nothing that `again` needs.
            again: Begins it again, among those that are left.

        Raises:
            RemoteError: A rank has failed, or is lost and nothing can go on.
            DivergenceError: The ranks' programs differ.
        """
        number = self.num_committed
        assert self._num_begun == number + 1, "operations of all groups overlap"
        while True:
            everybody = self._channel.everybody
            try:
                everybody.wait_agreed(2 * number, self._deadline_s)
                complete()
                everybody.start(2 * number + 1, self._digest)
                everybody.wait_agreed(2 * number + 1, self._deadline_s)
                break
            except (FarspanError, TransferError) as error:
                is_complete = self._recover(error) > number
                self._regroup.say(is_complete=is_complete)
                if is_complete:
                    break
                self._start()
                again()
        self.num_committed = number + 1

    def together(self, act: Callable[[], _T]) -> _T:
        """Returns the result of what all ranks do together, which changes nothing by itself."""
        results: list[_T] = []

        def complete() -> None:
            results[:] = [act()]

        self.begin(key_of("together"))
        self.commit(complete, lambda: None)
        return results[0]

    def _finish(self, deadline_s: float) -> None:
        """The program is over: wait until that of every rank that is left is."""
        while True:
            try:
                self._channel.everybody.finish(deadline_s)
                return
            except FarspanError as error:
                try:
                    self._recover(error)
                except ProgramsOverError:
                    return

    # Losses.

    def _hear(self, error: RemoteError) -> bool:
        """A rank is lost, says the channel of all, in its listener thread; returns whether this one may go on."""
        ranks = self._regroup.ranks
        if not 0 <= error.rank < len(ranks):
            return False
        first = self._membership.rank - self._channel.rank
        if first <= ranks[error.rank] < first + self._channel.world_size:
            return False  # of this group
        if not self._is_leaving and not self._membership.is_broken():  # else the launcher knows; or others have left
            self._membership.suspect(ranks[error.rank])
        self._regroup.abort()
        return True

    def _recover(self, error: Exception) -> int:
        """Forms the world of those that are left; returns how many operations one of them knows to be committed.

        Raises:
            Exception: `error`, if it has another cause than a loss.
            RemoteError: Nothing goes on, or this rank does not.
        """
        heard = self._channel.everybody.failure
        may_be_loss = isinstance(error, TransferError) or (isinstance(heard, RemoteError) and heard.is_loss)
        while True:
            if not self._membership.wait_broken(CAUSE_S if may_be_loss else 0.0):
                raise error
            self._is_leaving = True  # who closes its end of this world's channel is not lost
            world = self._membership.form(self.num_committed, self._deadline_s)
            try:
                self._regroup.form(world)
            except (FarspanError, RuntimeError) as other:
                error, may_be_loss = other, True  # of those that are left another one is lost, or it is a failure
                continue
            self._is_leaving = False
            return max(int(state) for state in world.states)

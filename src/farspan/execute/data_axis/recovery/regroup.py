"""Forms the world of the ranks that are left: a channel of all of them, and groups of torch's among them.

    store        `Stores`
    channel      its hub in the process of the first rank that is left
    positions    a gloo group for each position in a group, as at the start

Groups themselves, their channels, transports and plans stay what they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farspan.comm.collectives import GlooCollectives
from farspan.comm.rendezvous.join import join_side_channel
from farspan.errors import RemoteError
from farspan.launch.files import become_first, catch_up
from farspan.torch_private.groups import PrefixStore

if TYPE_CHECKING:
    from farspan.execute.data_axis.recovery.stores import Stores
    from farspan.execute.data_axis.reduction import Reduction
    from farspan.launch.membership import Membership, World

__all__ = ["Regroup"]

_CONSOLE_S, _FORMING_S = 10.0, 20.0
_LOST_MEANWHILE = "a rank is lost while the others form a new world."


class Regroup:
    """The part of one rank in forming worlds.

    Args:
        stores: By which the ranks of a new world find each other.
        membership: Who is left, says the launcher.
        reduction: Of this rank.
        deadline_s: The longest wait for another rank.

    Attributes:
        ranks: Those of the channel of all, by their number there, as the launcher counts them.
    """

    def __init__(self, stores: Stores, membership: Membership, reduction: Reduction, deadline_s: float) -> None:
        self._stores = stores
        self._membership = membership
        self._reduction = reduction
        self._deadline_s = deadline_s
        self.ranks = membership.world.ranks
        self._is_first = membership.rank == 0
        self._forming: World | None = None

    def abort(self) -> None:
        """End what is under way between the groups; from any thread."""
        self._reduction.peers.abort()

    def hear(self, lost: Sequence[int]) -> None:
        """Ranks are lost, says the launcher, in its listener thread: end all waits for them."""
        forming, ranks = self._forming, self.ranks
        if forming is not None:
            with contextlib.suppress(RuntimeError):  # its store is lost too, and who waits for it raises
                self._stores.leave_word(forming, lost)
        known = next((rank for rank in lost if rank in ranks), None)
        if known is not None:
            error = RemoteError(f"rank {known} is lost.", why="the launcher has seen it end.")
            error.rank, error.is_loss = ranks.index(known), True
            self._reduction.channel.lose(error)

    def form(self, world: World) -> None:
        """Leave the world before, and join all others in the one that is left.

        Raises:
            FarspanError, RuntimeError: Another rank is lost meanwhile, or it cannot be formed.
        """
        reduction, channel = self._reduction, self._reduction.channel
        reduction.peers.close()
        channel.everybody.close(linger_s=0.0)
        rank, num_ranks = world.ranks.index(self._membership.rank), len(world.ranks)
        number, position = divmod(rank, channel.world_size)
        assert position == channel.rank, "the groups that are left are whole"
        self._forming = world
        try:
            if self._membership.is_broken():
                raise RemoteError(_LOST_MEANWHILE)
            peers = self._stores.peers_in(world)
            joined = join_side_channel(peers, self._deadline_s)
        finally:
            self._forming = None
        num_groups = num_ranks // channel.world_size
        self.ranks = world.ranks
        channel.join(joined.side, number, num_groups)
        reduction.agreement.side = joined.side
        positions = PrefixStore(f"position {position}", peers.store)
        forming_s = min(_FORMING_S, self._deadline_s)  # all are there: who does not come any more is lost
        owners = GlooCollectives(positions, number, num_groups, joined.address, self._deadline_s, forming_s=forming_s)
        reduction.regroup(owners)
        if rank == 0 and not self._is_first:
            become_first()
            self._membership.take_console(_CONSOLE_S)
            self._is_first = True
        joined.side.contribute("files", b"")
        joined.side.gathered("files", self._deadline_s)
        catch_up()
        if self._membership.is_broken():
            raise RemoteError(_LOST_MEANWHILE)

    def say(self, *, is_complete: bool) -> None:
        """Say on the console what the lost groups no longer take part in.

        Args:
            is_complete: Whether what all groups were doing together is done with them.
        """
        reduction = self._reduction
        left, first = reduction.num_groups, reduction.first_num_groups
        step = reduction.num_windows - (reduction.is_averaging and not is_complete)
        reduction.engine.console.warn(
            f"farspan: {self._membership.reasons[-1]}; {left} of {first} groups of ranks go{'es' * (left == 1)} on: "
            f"from step {step} (counted from 0) gradients are the mean over {'it' if left == 1 else 'these'} alone."
        )

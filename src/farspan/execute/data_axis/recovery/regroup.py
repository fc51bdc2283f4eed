"""Forms the world of the ranks that are left: a channel of all of them, and groups of torch's among them.

    store        `Forming`
    channel      its hub in the process of the first rank that is left
    positions    a gloo group for each position in a group, as at the start

Groups themselves, their channels, transports and plans stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from farspan.comm.collectives import GlooCollectives, HostCollectives
from farspan.comm.rendezvous.join import join_side_channel
from farspan.execute.data_axis.recovery.forming import Forming, error_of_loss
from farspan.torch_private.groups import PrefixStore

if TYPE_CHECKING:
    from farspan.comm.rendezvous.group import Peers
    from farspan.execute.data_axis.reduction import Reduction
    from farspan.launch.membership import Membership, World

__all__ = ["Regroup"]

_FORMING_S = 20.0


class Regroup(Forming):
    """The part of one rank in forming worlds of groups.

    Args:
        reduction: Of this rank; all others as for `Forming`.

    Attributes:
        ranks: Those of the channel of all, by their number there, as the launcher counts them.
    """

    def __init__(
        self, peers: Peers, address: str, membership: Membership, deadline_s: float, reduction: Reduction
    ) -> None:
        super().__init__(peers, address, membership, deadline_s)
        self._reduction = reduction
        self.ranks = membership.world.ranks

    def abort(self) -> None:
        """End what is under way between the groups; from any thread."""
        self._reduction.peers.abort()

    def hear(self, lost: Sequence[int]) -> None:
        """Ranks are lost, says the launcher, in its listener thread: end all waits for them."""
        super().hear(lost)
        error = error_of_loss(lost, self.ranks)
        if error is not None:
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
        with self._finding(world) as peers:
            joined = join_side_channel(peers, self._deadline_s)
        num_groups = num_ranks // channel.world_size
        self.ranks = world.ranks
        channel.join(joined.side, number, num_groups)
        reduction.agreement.side = joined.side
        positions = PrefixStore(f"position {position}", peers.store)
        forming_s = min(_FORMING_S, self._deadline_s)  # all are there: who does not come any more is lost
        owners = GlooCollectives(positions, number, num_groups, joined.address, self._deadline_s, forming_s=forming_s)
        reduction.regroup(HostCollectives(owners))
        self._go_on(joined.side)

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

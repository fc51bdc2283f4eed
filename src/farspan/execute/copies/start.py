"""Lets a rank go on after losses in a world without groups, where `farspan run --keep-going` has started it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.execute.copies.keeper import Keeper
from farspan.execute.copies.worlds import Worlds
from farspan.execute.data_axis.recovery.forming import join_membership

if TYPE_CHECKING:
    from farspan.comm.rendezvous.group import Peers
    from farspan.execute.engine import Engine
    from farspan.launch.membership import Membership

__all__ = ["keep_copies"]


def keep_copies(engine: Engine, peers: Peers, address: str, deadline_s: float) -> None:
    """Let this rank keep copies of what others own, if they share wide stages, and go on with them.

    Args:
        engine: This rank's.
        peers: This rank among all.
        address: Of this host, at which the other ranks reach it.
        deadline_s: The longest wait for another rank.
    """

    def join(needed_for: str) -> tuple[Membership, Worlds]:
        membership = join_membership(peers, group=peers.rank, num_groups=peers.world_size, needed_for=needed_for)
        return membership, Worlds(peers, address, membership, deadline_s)

    engine.losses = Keeper(engine, join)

"""Lets a rank go on after losses in a world without groups, where `farspan run --keep-going` has started it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from farspan.errors import LaunchError
from farspan.execute.copies.keeper import Keeper
from farspan.execute.copies.worlds import Worlds
from farspan.execute.data_axis.recovery.stores import Stores
from farspan.launch.membership import Membership

if TYPE_CHECKING:
    from farspan.comm.rendezvous.group import Peers
    from farspan.execute.engine import Engine

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
        size = peers.world_size
        try:
            membership = Membership(
                os.environ["FARSPAN_RUN_FOLDER"],
                peers.rank,
                world=range(size),
                group=peers.rank,
                num_groups=size,
                needed_for=needed_for,
            )
        except OSError as error:
            raise LaunchError(
                f"rank {peers.rank} does not reach farspan run --keep-going.", why=f"{error.strerror or error}."
            ) from None
        return membership, Worlds(Stores(peers, address, membership, deadline_s), membership, deadline_s)

    engine.losses = Keeper(engine, join)

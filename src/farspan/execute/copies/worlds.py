"""Forms the world of the ranks that are left: a channel of all of them, and what carries their tensors.

store      `Stores`
channel    its hub in the process of the first rank that is left
router     made again: connections between ranks of one host, a gloo group
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farspan.comm.rendezvous.network import SocketNetwork
from farspan.errors import RemoteError
from farspan.execute.agreement.agreement import Agreement
from farspan.launch.files import become_first, catch_up

if TYPE_CHECKING:
    from farspan.comm.router import Router
    from farspan.control.channel import SideChannel
    from farspan.execute.data_axis.recovery.stores import Stores
    from farspan.launch.membership import Membership, World

__all__ = ["Worlds"]

_CONSOLE_S = 10.0
_LOST_MEANWHILE = "a rank is lost while the others form a new world."


class Worlds:
    """The part of one rank in forming worlds.

    Args:
        stores: By which the ranks of a new world find each other.
        membership: Who is left, says the launcher.
        deadline_s: The longest wait for another rank.
    """

    def __init__(self, stores: Stores, membership: Membership, deadline_s: float) -> None:
        self._stores = stores
        self._membership = membership
        self._deadline_s = deadline_s
        self._is_first = membership.rank == 0
        self._forming: World | None = None

    def hear(self, lost: Sequence[int]) -> None:
        """Ranks are lost, says the launcher, in its listener thread: who waits for them in a new world raises."""
        forming = self._forming
        if forming is not None:
            with contextlib.suppress(RuntimeError):  # its store is lost too, and who waits for it raises
                self._stores.leave_word(forming, lost)

    def form(self, world: World) -> tuple[SideChannel, Router | None]:
        """Joins all others that are left.

        Returns:
            The channel of all, and what carries tensors, if there are others.

        Raises:
            FarspanError, RuntimeError: Another rank is lost meanwhile, or it cannot be formed.
        """
        self._forming = world
        try:
            self._check()
            network = SocketNetwork(self._stores.peers_in(world))
            side = network.join(self._deadline_s)
        finally:
            self._forming = None
        try:
            router = None
            if network.world_size > 1:
                router = network.open_router(Agreement(side, self._deadline_s).gather, self._deadline_s)
                side.wake = router.resume
            if side.rank == 0 and not self._is_first:
                become_first()
                self._membership.take_console(_CONSOLE_S)
                self._is_first = True
            side.contribute("files", b"")
            side.gathered("files", self._deadline_s)
            catch_up()
            self._check()
        except BaseException:
            side.close(linger_s=0.0)
            raise
        return side, router

    def _check(self) -> None:
        if self._membership.is_broken():
            raise RemoteError(_LOST_MEANWHILE)

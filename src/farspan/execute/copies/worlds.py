"""Forms the world of the ranks that are left: a channel of all of them, and what carries their tensors.

store      `Forming`
channel    its hub in the process of the first rank that is left
router     made again: connections between ranks of one host, a gloo group
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.comm.rendezvous.network import SocketNetwork
from farspan.execute.agreement.agreement import Agreement
from farspan.execute.data_axis.recovery.forming import Forming

if TYPE_CHECKING:
    from farspan.comm.router import Router
    from farspan.control.channel import SideChannel
    from farspan.launch.membership import World

__all__ = ["Worlds"]


class Worlds(Forming):
    """The part of one rank in forming worlds without groups."""

    def form(self, world: World) -> tuple[SideChannel, Router | None]:
        """Joins all others that are left.

        Returns:
            The channel of all, and what carries tensors, if there are others.

        Raises:
            FarspanError, RuntimeError: Another rank is lost meanwhile, or it cannot be formed.
        """
        with self._finding(world) as peers:
            network = SocketNetwork(peers)
            side = network.join(self._deadline_s)
        try:
            router = None
            if network.world_size > 1:
                router = network.open_router(Agreement(side, self._deadline_s).gather, self._deadline_s)
                side.wake = router.resume
            self._go_on(side)
        except BaseException:
            side.close(linger_s=0.0)
            raise
        return side, router

"""The stores by which the ranks of a new world find each other.

on one machine      the file of the start, under the number of the world
on several hosts    a store in the first rank that is left: that of the world before may be lost with its host
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from farspan.comm.rendezvous.group import Peers
from farspan.comm.rendezvous.records import absence
from farspan.torch_private.groups import PrefixStore, TCPStore

if TYPE_CHECKING:
    from farspan.launch.membership import Membership, World

__all__ = ["Stores"]

_WORD_S = 10.0


class Stores:
    """The stores of one rank, one after the other.

    Args:
        peers: This rank among all of the start, and their store.
        address: Of this host, at which the other ranks reach it.
        membership: What the launcher says.
        deadline_s: The longest wait for another rank.
    """

    def __init__(self, peers: Peers, address: str, membership: Membership, deadline_s: float) -> None:
        self._peers = peers
        self._address = address
        self._membership = membership
        self._deadline_s = deadline_s
        self._hosted: Any = None
        self._place: tuple[str, int] | None = None

    def peers_in(self, world: World) -> Peers:
        """Returns this rank among those that are left, with a store of theirs alone.

        Raises:
            FarspanError, RuntimeError: A rank is lost meanwhile, or the store cannot be reached.
        """
        rank, size = world.ranks.index(self._membership.rank), len(world.ranks)
        store, host = self._peers.store, self._peers.host
        if self._peers.launcher == "hosts":
            if rank == 0:
                self._hosted = self._open((self._address, 0), is_host=True)
                self._membership.publish_store(self._address, self._hosted.port)
            self._place = host, _ = self._membership.find_store(self._deadline_s)
            store = self._open(self._place)
        prefixed = PrefixStore(f"generation {world.generation}", store)
        return dataclasses.replace(self._peers, rank=rank, world_size=size, store=prefixed, host=host)

    def leave_word(self, world: World, lost: Sequence[int]) -> None:
        """Lets this rank, which may wait for records of those that are lost in a new world, raise; from any thread."""
        store: Any = self._peers.store
        if self._peers.launcher == "hosts":
            if self._place is None:
                return
            store = self._open(self._place, limit_s=_WORD_S)  # the other connection waits
        store = PrefixStore(f"generation {world.generation}", store)
        for rank in lost:
            if rank in world.ranks:
                number = world.ranks.index(rank)
                for key in (f"rank {number}", f"joined {number}", "hub" if number == 0 else f"relay {number}"):
                    store.set(key, json.dumps(absence("it is lost")))

    def _open(self, place: tuple[str, int], *, is_host: bool = False, limit_s: float | None = None) -> Any:
        limit = timedelta(seconds=self._deadline_s if limit_s is None else limit_s)
        return TCPStore(*place, None, is_master=is_host, timeout=limit, wait_for_workers=False)

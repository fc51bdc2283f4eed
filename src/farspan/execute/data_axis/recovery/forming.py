"""Forms the world of the ranks that are left: how these find each other, and whose files and console the script has.

on one machine      they find each other by the file of the start, under the number of the world
on several hosts    by a store in the first rank that is left: that of the world before may be lost with its host
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from farspan.comm.rendezvous.group import Peers
from farspan.comm.rendezvous.records import absence
from farspan.errors import LaunchError, RemoteError
from farspan.launch.files import become_first, catch_up
from farspan.launch.membership import Membership
from farspan.torch_private.groups import PrefixStore, TCPStore

if TYPE_CHECKING:
    from farspan.control.channel import SideChannel
    from farspan.launch.membership import World

__all__ = ["Forming", "error_of_loss", "join_membership"]

_CONSOLE_S, _WORD_S = 10.0, 10.0


class Forming:
    """The part of one rank in forming worlds, one after the other.

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
        self._is_first = membership.rank == 0
        self._forming: World | None = None
        self._hosted: Any = None
        self._place: tuple[str, int] | None = None

    def hear(self, lost: Sequence[int]) -> None:
        """Ranks are lost, says the launcher, in its listener thread: who waits for them in a new world raises."""
        forming = self._forming
        if forming is not None:
            with contextlib.suppress(RuntimeError):  # its store is lost too, and who waits for it raises
                self._leave_word(forming, lost)

    @contextlib.contextmanager
    def _finding(self, world: World) -> Iterator[Peers]:
        """Gives this rank among those that are left, which find each other in the body."""
        self._forming = world
        try:
            self._check()
            yield self._peers_in(world)
        finally:
            self._forming = None

    def _go_on(self, side: SideChannel) -> None:
        """All that are left have found each other; `side` is the channel of all of them."""
        if side.rank == 0 and not self._is_first:
            become_first()
            self._membership.take_console(_CONSOLE_S)
            self._is_first = True
        side.contribute("files", b"")
        side.gathered("files", self._deadline_s)
        catch_up()
        self._check()

    def _check(self) -> None:
        if self._membership.is_broken():
            raise RemoteError("a rank is lost while the others form a new world.")

    def _peers_in(self, world: World) -> Peers:
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

    def _leave_word(self, world: World, lost: Sequence[int]) -> None:
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


def join_membership(peers: Peers, *, group: int, num_groups: int, needed_for: str = "") -> Membership:
    """Connects this rank with the launcher, which says who is lost; see `Membership`.

    Raises:
        LaunchError: The launcher is not there.
    """
    folder, world = os.environ["FARSPAN_RUN_FOLDER"], range(peers.world_size)
    try:
        return Membership(folder, peers.rank, world=world, group=group, num_groups=num_groups, needed_for=needed_for)
    except OSError as error:
        raise LaunchError(
            f"rank {peers.rank} does not reach farspan run --keep-going.", why=f"{error.strerror or error}."
        ) from None


def error_of_loss(lost: Sequence[int], ranks: Sequence[int]) -> RemoteError | None:
    """Returns the error for ranks that are lost; None where none of them is among `ranks`, those of a world."""
    known = next((rank for rank in lost if rank in ranks), None)
    if known is None:
        return None
    error = RemoteError(f"rank {known} is lost.", why="the launcher has seen it end.")
    error.rank, error.is_loss = ranks.index(known), True
    return error

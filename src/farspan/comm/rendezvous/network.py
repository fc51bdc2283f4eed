"""How the ranks of a job reach each other: what connects them, and what divides them into groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

from farspan import settings
from farspan.comm.collectives import Collectives, GlooCollectives, HostCollectives
from farspan.comm.gloo import GlooTransport
from farspan.comm.nccl import NcclTransport, has_nccl
from farspan.comm.rendezvous.data_groups import form_groups, peers_in_group
from farspan.comm.rendezvous.group import Peers
from farspan.comm.rendezvous.join import Joined, join_side_channel
from farspan.comm.router import Router
from farspan.comm.same_host.copies import SameHostTransport
from farspan.control.channel import SideChannel
from farspan.control.groups.group_channel import GroupChannel
from farspan.launch.rank.process_end import at_process_end

__all__ = ["Gather", "Network", "Reached", "SocketNetwork"]

Gather = Callable[[str, bytes], list[bytes]]
"""Gives what all ranks give, by rank; the first argument says what it is."""


class Reached(Protocol):
    """One rank among those to which it sends tensors.

    Attributes:
        rank: Of this process.
        world_size: Number of ranks.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def open_router(self, gather: Gather, limit_s: float) -> Router:
        """Returns what carries the tensors; all ranks call it together, once they have joined."""
        ...


class Network(Reached, Protocol):
    """One rank among all of a job.

    Attributes:
        launcher: What has started them, as in `Environment`; "program" if the script itself is one for several
            processes.
    """

    @property
    def launcher(self) -> str: ...

    def join(self, limit_s: float) -> SideChannel:
        """Waits until all ranks have called this, and connects them.

        Raises:
            RemoteError: Another rank has failed, or has ended before it came here.
            DeadlineError: Some rank has not come in time.
            LaunchError: No way to the others.
        """
        ...

    def divide(self, num_groups: int, gather: Gather, limit_s: float) -> tuple[GroupChannel, Reached]:
        """Forms groups of equal size, in order; all ranks call it together, once they have joined.

        Returns:
            The side channel of this rank's group, and its ranks.
        """
        ...

    def owners(self, channel: GroupChannel, limit_s: float) -> Collectives:
        """Returns the collectives among the ranks at this one's position in all groups; all ranks call it together."""
        ...

    def at_end(self, leave: Callable[[], None]) -> None:
        """Let `leave` be called at the end of the process, or earlier if what connects the ranks ends."""
        ...

    def close(self, *, is_over_well: bool, has_raised: bool) -> None:
        """Ends what connects the ranks, the last of all.

        Args:
            is_over_well: Whether the program of this rank has ended as those of all others.
            has_raised: Whether the program of this rank ends with an exception.
        """
        ...


class SocketNetwork:
    """Ranks that find each other by a store, and are connected by sockets.

    Args:
        peers: This rank among the others.
        joined: What it has once they have joined; for the ranks of a group.
    """

    def __init__(self, peers: Peers, joined: Joined | None = None) -> None:
        self.rank, self.world_size, self.launcher = peers.rank, peers.world_size, peers.launcher
        self.peers = peers
        self._joined = joined

    def join(self, limit_s: float) -> SideChannel:
        self._joined = join_side_channel(self.peers, limit_s)
        return self._joined.side

    def open_router(self, gather: Gather, limit_s: float) -> Router:
        rank, store = self.rank, self.peers.store
        device = NcclTransport(dist.PrefixStore("nccl", store), rank) if has_nccl() else None
        near = None
        # All ranks have the variable or none; a rank that had it alone would wait for the others' half of the
        # introduction.
        if settings.flag("SAME_HOST", default=True):
            near = SameHostTransport.join(rank, lambda card: gather("same-host peers", card), limit_s)
        address = self.address
        host = GlooTransport(dist.PrefixStore("gloo", store), rank, self.world_size, address, limit_s)
        return Router(host, device, near)

    def divide(self, num_groups: int, gather: Gather, limit_s: float) -> tuple[GroupChannel, SocketNetwork]:
        assert self._joined is not None
        channel = form_groups(self._joined, num_groups, gather, limit_s)
        in_group = peers_in_group(self.peers, channel.number, num_groups)
        return channel, SocketNetwork(in_group, dataclasses.replace(self._joined, side=channel))

    def owners(self, channel: GroupChannel, limit_s: float) -> Collectives:
        store = dist.PrefixStore(f"position {channel.rank}", self.peers.store)
        return HostCollectives(GlooCollectives(store, channel.number, channel.num_groups, self.address, limit_s))

    def at_end(self, leave: Callable[[], None]) -> None:
        at_process_end(leave)

    def close(self, *, is_over_well: bool, has_raised: bool) -> None:
        pass

    @property
    def address(self) -> str:
        """Returns an address of this host at which all other ranks reach it."""
        assert self._joined is not None
        return self._joined.address

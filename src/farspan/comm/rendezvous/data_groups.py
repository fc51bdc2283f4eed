"""The ranks, which have found each other, form groups of equal size: each gets a side channel of its own.

round 0   rank 0 of each group opens its hub      all gather where
round 1   relays connect to it, where a group has more than 33 ranks
...
every rank connects to its group's hub, or to the relay above it
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from farspan.comm.rendezvous.group import Peers
from farspan.comm.rendezvous.join import Joined
from farspan.control.channel import SideChannel
from farspan.control.groups.group_channel import GroupChannel
from farspan.control.hub.server import HubServer
from farspan.control.link import LoopLink, connect
from farspan.control.tree.numbers import ancestors, host_of, parent
from farspan.torch_private.groups import PrefixStore

__all__ = ["form_groups", "peers_in_group"]


def peers_in_group(peers: Peers, number: int, num_groups: int) -> Peers:
    """Returns this rank as one among those of its group.

    Args:
        peers: This rank among all.
        number: Of the group.
        num_groups: How many groups there are.
    """
    size = peers.world_size // num_groups
    store = PrefixStore(f"group {number}", peers.store)
    return dataclasses.replace(peers, rank=peers.rank % size, world_size=size, store=store)


def form_groups(
    joined: Joined, num_groups: int, gather: Callable[[str, bytes], list[bytes]], limit_s: float
) -> GroupChannel:
    """Connect the ranks of each group; all ranks of all groups call it together.

    Args:
        joined: What this rank has of the channel of all ranks.
        num_groups: How many groups; it divides the number of ranks. Group 0 has the first ranks, and so on.
        gather: Gives what all ranks give, by rank.
        limit_s: The longest wait.
    """
    everybody = joined.side
    size = everybody.world_size // num_groups
    number, rank = divmod(everybody.rank, size)
    secret = f"{everybody.secret} group {number}"
    if size == 1:
        return GroupChannel(everybody, number, num_groups, LoopLink(), secret=secret)
    server: HubServer | None = None
    places: dict[int, tuple[str, int]] = {}
    """Addresses of the hubs or relays, by rank of this group."""
    host, is_host = host_of(rank, size), host_of(rank, size) == rank
    depths = [_depth(each) for each in range(size) if host_of(each, size) == each]
    for depth in range(max(depths) + 1):
        if is_host and _depth(rank) == depth:
            above = places[parent(rank)] if rank else None
            server = SideChannel.host(size, secret, joined.address, rank=rank, parent=above, deadline_s=limit_s)
        found = gather("addresses of groups", json.dumps(server.address if server is not None else None).encode())
        of_group = found[number * size : (number + 1) * size]
        places.update({each: tuple(json.loads(part)) for each, part in enumerate(of_group) if part != b"null"})
    link = connect(rank, size, places[host], secret, limit_s, host=host)
    return GroupChannel(everybody, number, num_groups, link, server, secret=secret)


def _depth(rank: int) -> int:
    """Returns how many connections lie between a rank and its hub."""
    return len(ancestors(rank)) + 1 if rank else 0

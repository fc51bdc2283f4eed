"""Computes who is connected to whom: a tree over the ranks' numbers in which each node has at most 32 children.

              0                       up to 33 ranks a star: all connect to rank 0, where the hub is
  1       2      ...    32
33-64   65-96   ...                   a rank that has children passes on what they say (`relay`)
"""

from __future__ import annotations

__all__ = ["FAN_OUT", "ancestors", "children", "client_towards", "host_of", "parent", "ranks_below"]

FAN_OUT = 32
"""The most children that a node has."""


def parent(rank: int) -> int:
    """Returns the rank that passes on what `rank`, which is not 0, says."""
    return (rank - 1) // FAN_OUT


def children(rank: int, world_size: int) -> range:
    """Returns the ranks of which `rank` is the parent."""
    first = rank * FAN_OUT + 1
    return range(min(first, world_size), min(first + FAN_OUT, world_size))


def host_of(rank: int, world_size: int) -> int:
    """Returns the rank in whose process the channel of `rank` finds the hub or a relay: its own if it has one."""
    return rank if rank == 0 or children(rank, world_size) else parent(rank)


def ancestors(rank: int) -> list[int]:
    """Returns the ranks that pass on what is said between the hub and `rank`, from the hub's side, without rank 0.

    >>> ancestors(33), ancestors(2)
    ([1], [])
    """
    found: list[int] = []
    while rank and (rank := parent(rank)):
        found.insert(0, rank)
    return found


def client_towards(rank: int, node: int) -> int | None:
    """Returns the connection of `node` that leads to `rank`: its own channel's or a child's; None if `rank` is not
    below it."""
    if rank == node:
        return node
    while rank > node:
        above = parent(rank)
        if above == node:
            return rank
        rank = above
    return None


def ranks_below(node: int, world_size: int) -> list[int]:
    """Returns the rank `node` and all below it, in order."""
    found, level = [node], range(node, node + 1)
    while level := range(children(level[0], world_size).start, children(level[-1], world_size).stop):
        found += level
    return found

"""Links between ranks, as the simulator sees them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Link", "Route", "own_links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A wire that carries one message after another.

    Attributes:
        name: Pairs of ranks whose links have the same name share one.
        latency: From the last byte's leaving to its arrival, in the unit of the tasks' durations.
        bandwidth: Bytes per unit of time.
    """

    name: str
    latency: float = 0.0
    bandwidth: float = math.inf


Route = Callable[[int, int], Link]
"""The link from one rank to another."""


def own_links(*, latency: float = 0.0, bandwidth: float = math.inf) -> Route:
    """Gives every pair of ranks a link of its own in each direction, all alike.

    >>> own_links(latency=0.1)(0, 1)
    Link(name='0>1', latency=0.1, bandwidth=inf)
    """
    return lambda source, destination: Link(name=f"{source}>{destination}", latency=latency, bandwidth=bandwidth)

"""Which group holds the shard of each parameter: the ranks at one position of all groups divide theirs by bytes.

position 0     w0 (4 MB)  w1 (3 MB)  w2 (2 MB)  w3 (1 MB)      the same parameters in each group
home group        0          1          1          0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.plan import Team

__all__ = ["ShardHomes"]


class ShardHomes:
    """The home group of each parameter, alike on all ranks of all groups.

    Args:
        number: Of this rank's group.
        num_groups: How many groups there are.
        num_ranks: Of each group.
        teams: Who runs each stage.
    """

    def __init__(self, number: int, num_groups: int, num_ranks: int, teams: Sequence[Team]) -> None:
        self.number = number
        self._num_groups = num_groups
        self._num_ranks = num_ranks
        self._teams = teams
        self._home: dict[str, int] = {}
        self._loads: dict[tuple[int, bool], list[int]] = {}
        """Bytes that each group holds at a position, of parameters that are trained and of others."""

    def add(self, items: Iterable[Placed]) -> None:
        """Divide the parameters among `items`, those of all positions: the largest first, to whoever has least."""
        parameters = [item for item in items if item.is_parameter]
        for item in sorted(parameters, key=lambda item: -item.meta.size_bytes):
            key = (self._position_of(item), item.is_trained)
            loads = self._loads.setdefault(key, [0] * self._num_groups)
            self._home[item.name] = home = loads.index(min(loads))
            loads[home] += item.meta.size_bytes

    def knows(self, item: Placed) -> bool:
        return item.name in self._home

    def group_of(self, item: Placed) -> int:
        """Returns the number of the group that holds the shard of a parameter."""
        return self._home[item.name]

    def rank_of(self, item: Placed) -> int:
        """Returns the rank that holds it, among the ranks of all groups."""
        return self._home[item.name] * self._num_ranks + self._position_of(item)

    def is_here(self, item: Placed) -> bool:
        """Returns whether this rank holds it."""
        return item.is_owned and self._home[item.name] == self.number

    def _position_of(self, item: Placed) -> int:
        return self._teams[item.stage].leader.rank

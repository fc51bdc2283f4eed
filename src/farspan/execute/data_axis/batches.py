"""Checks that the groups train on batches of their own: the same ones in all are four times the work for nothing.

In the first windows all ranks say which data they were given; rank 0 of all compares those of the groups.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farspan.control.groups.group_channel import GroupChannel
    from farspan.execute.agreement.agreement import Agreement
    from farspan.execute.process.console import Console
    from farspan.graph import Graph

__all__ = ["Batches"]

_NUM_COMPARED = 3
"""Windows; groups may well have the same data in one of them."""
_SAME = """\
farspan: all {n} groups train on the same batches. Give each its share: DistributedSampler(dataset,
  num_replicas=farspan.data_world(), rank=farspan.data_rank()), or batches[farspan.data_rank()::farspan.data_world()]"""


class Batches:
    """The batches of one rank's group, as far as they are compared with those of other groups.

    Args:
        channel: Of its group.
        agreement: Of all ranks of all groups.
        console: Of this rank.
    """

    def __init__(self, channel: GroupChannel, agreement: Agreement, console: Console) -> None:
        self._channel = channel
        self._agreement = agreement
        self._console = console
        self._data: list[tuple[int, ...]] = []
        self._num_same = 0
        self._is_comparable = True

    def note(self, graphs: Sequence[Graph], data: tuple[int, ...]) -> None:
        """A step is given `data`, which are checksums; what one rank has read for its group is not among them."""
        if self._num_same < 0:
            return
        is_read = any(not value.name and not value.gradient_of for graph in graphs for value in graph.sources)
        self._is_comparable &= any(data) and not is_read
        self._data.append(data)

    def end(self) -> None:
        """Compares nothing any more: a group is lost."""
        self._num_same = -1

    def end_window(self, number: int) -> None:
        """Ends a window; all ranks of all groups call it."""
        if number < _NUM_COMPARED and self._num_same >= 0:
            said = json.dumps(self._data if self._is_comparable else None)
            parts = self._agreement.gather_at(0, "checksums of batches", said.encode())
            firsts = set(parts[:: self._channel.world_size])
            self._num_same += len(firsts) == 1 and firsts != {b"null"}
            if self._num_same == _NUM_COMPARED:
                self._console.warn(_SAME.format(n=self._channel.num_groups))
        if number == _NUM_COMPARED - 1:
            self._num_same = -1
        self._data.clear()

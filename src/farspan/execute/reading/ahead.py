"""Other ranks' parameters that the program reads one after the other, fetched several at a time.

    first read     one parameter       (it could be the only one)
    second read    with it the next one of its owner
    fourth read    with it the next three ...

An average over 200 parameters takes a few requests the first time, and from then on one for each owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from farspan.call.leaf import Placed
from farspan.record.saving.reserved import is_reservable

__all__ = ["ParametersAhead"]

_MOST_BYTES = 64 << 20
"""Limit on parameters that have not been asked for yet, in one request."""


class ParametersAhead:
    """Parameters that have been fetched and not been read, until the program gets to a point where they may have
    changed."""

    def __init__(self, pull: Callable[[int, Sequence[str]], list[torch.Tensor]]) -> None:
        self._pull = pull
        self._fetched: dict[str, torch.Tensor] = {}
        self._num_reads = 0
        self._num_before = 0
        """The last time that any were read."""

    def read(self, placed: Placed, rank: int, owned: Iterable[Placed]) -> torch.Tensor:
        """Returns the data of a parameter.

        Args:
            placed: The parameter.
            rank: Its owner.
            owned: All that this owner has, in the order of the model.
        """
        known = self._fetched.pop(placed.name, None)
        if known is None:
            items = self._with_those_to_come(placed, list(owned))
            data = self._pull(rank, [item.name for item in items])
            self._fetched.update(zip([item.name for item in items], data, strict=True))
            known = self._fetched.pop(placed.name)
        self._num_reads += 1
        return known

    def forget(self) -> None:
        """Parameters may have changed."""
        self._fetched.clear()
        if self._num_reads:
            self._num_before, self._num_reads = self._num_reads, 0

    def _with_those_to_come(self, placed: Placed, owned: list[Placed]) -> list[Placed]:
        number = max(self._num_reads, self._num_before - self._num_reads)
        begin = owned.index(placed)
        items, size_bytes = [placed], 0
        is_small = not is_reservable(placed.meta.size_bytes)
        for item in owned[begin + 1 : begin + number]:
            if is_small and is_reservable(item.meta.size_bytes):
                continue  # a file takes it when it comes to it
            size_bytes += item.meta.size_bytes
            if size_bytes > _MOST_BYTES:
                break
            if item.name not in self._fetched:
                items.append(item)
        return items

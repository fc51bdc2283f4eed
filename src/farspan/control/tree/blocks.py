"""The parts of an all-gather on their way: blocks that hold the parts of some ranks, put together at each node.

+-------------+------------+----------+---------------+--------------+-----------+
| ranges u32  | sizes u32  | data u64 | first, last.. | size, size.. | the parts |   one block of a payload
+-------------+------------+----------+---------------+--------------+-----------+

Parts that are all the same, as digests are, have one size and are in their block once.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

from farspan.control.wire import MAX_PAYLOAD_BYTES, Buffer, ProtocolError

__all__ = ["MAX_PARTS_BYTES", "Parts", "parts_by_rank", "ranges_of", "ranks_in"]

MAX_PARTS_BYTES = MAX_PAYLOAD_BYTES - (1 << 20)
"""Limit on all parts of one gather; what remains of a frame is for who has given what."""
_HEAD = struct.Struct("!IIQ")


def ranges_of(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of ordered ranks, each as its first and last one.

    >>> ranges_of([1, 33, 34, 35])
    [(1, 1), (33, 35)]
    """
    if ranks and ranks[-1] - ranks[0] == len(ranks) - 1:
        return [(ranks[0], ranks[-1])]
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    return runs


@functools.lru_cache(maxsize=1_000)
def ranks_in(ranges: tuple[tuple[int, int], ...], world_size: int) -> tuple[int, ...]:
    """Returns the ranks in ranges that another rank has sent, each once."""
    found: list[int] = []
    for first, last in ranges:
        if not 0 <= first <= last < world_size:
            raise ProtocolError(f"ranks {first} to {last} of {world_size}")
        found += range(first, last + 1)
    if len(set(found)) != len(found):
        raise ProtocolError(f"{len(found)} ranks, some of them more than once")
    return tuple(found)


class _Block(NamedTuple):
    """The parts of some ranks."""

    ranges: tuple[tuple[int, int], ...]
    sizes: Sequence[int]
    """The size of each rank's part; one size, where the parts are all the same."""
    data: Buffer
    encoded: Buffer = b""
    """All of it, where it has come from another node."""

    @property
    def num_ranks(self) -> int:
        return sum([last - first + 1 for first, last in self.ranges])

    def is_same_for_all(self) -> bool:
        return len(self.sizes) == 1

    def encode(self) -> list[Buffer]:
        if self.encoded:
            return [self.encoded]
        numbers = [*chain.from_iterable(self.ranges), *self.sizes]
        head = _HEAD.pack(len(self.ranges), len(self.sizes), len(self.data))
        return [head, struct.pack(f"!{len(numbers)}I", *numbers), self.data]


def _blocks_in(payload: Buffer) -> list[_Block]:
    blocks: list[_Block] = []
    view, at = memoryview(payload), 0
    try:
        while at < len(view):
            num_ranges, num_sizes, num_bytes = _HEAD.unpack_from(view, at)
            first, begin = at, at + _HEAD.size
            numbers = struct.unpack_from(f"!{2 * num_ranges + num_sizes}I", view, begin)
            begin += 4 * len(numbers)
            at = begin + num_bytes
            if at > len(view):
                raise ProtocolError(f"a block of {num_bytes} bytes with {len(view) - begin} of them")
            ends = 2 * num_ranges
            ranges = tuple(zip(numbers[0:ends:2], numbers[1:ends:2], strict=True))
            blocks.append(_Block(ranges, numbers[ends:], view[begin:at], view[first:at]))
    except struct.error as error:
        raise ProtocolError(f"parts without their head: {error}") from None
    return blocks


@dataclass(slots=True)
class Parts:
    """The parts that have come to one node for one gather.

    Attributes:
        ranks: Whose parts.
        size_bytes: Of all of them.
        is_old: It waits for others since the last look.
        receiver: The only rank that is to have all of them; None where all are.
    """

    ranks: set[int] = field(default_factory=set[int])
    size_bytes: int = 0
    is_old: bool = False
    receiver: int | None = None
    _single: dict[int, Buffer] = field(default_factory=dict[int, Buffer])
    _blocks: list[_Block] = field(default_factory=list[_Block])

    def add(self, rank: int, part: Buffer) -> None:
        """The part of one rank."""
        if rank in self.ranks:
            raise ProtocolError("a part that was given before")
        self.ranks.add(rank)
        self.size_bytes += len(part)
        self._single[rank] = part

    def add_blocks(self, payload: Buffer, world_size: int) -> tuple[int, ...]:
        """Parts that another node has put together; the ranks that gave them."""
        blocks, ranges = _blocks_in(payload), list[tuple[int, int]]()
        for block in blocks:
            ranges += block.ranges
            self.size_bytes += len(block.data)
        added = ranks_in(tuple(ranges), world_size)
        if not self.ranks.isdisjoint(added):
            raise ProtocolError("a part that was given before")
        self.ranks.update(added)
        self._blocks += blocks
        return added

    def take_blocks(self) -> bytes:
        """Returns, as a payload, all that has come since the last call."""
        blocks, single, self._single, self._blocks = self._blocks, self._single, {}, []
        if single:
            ranks = sorted(single)
            parts = [single[rank] for rank in ranks]
            is_same = all(part == parts[0] for part in parts)
            parts = parts[:1] if is_same else parts
            blocks = [_Block(tuple(ranges_of(ranks)), [len(part) for part in parts], b"".join(parts)), *blocks]
        if len(blocks) > 1 and all(block.is_same_for_all() and block.data == blocks[0].data for block in blocks):
            ranges = tuple(each for block in blocks for each in block.ranges)
            blocks = [_Block(ranges, blocks[0].sizes, blocks[0].data)]
        return b"".join([buffer for block in blocks for buffer in block.encode()])


def parts_by_rank(payload: Buffer, world_size: int) -> list[bytes]:
    """Returns the part of each rank."""
    blocks = _blocks_in(payload)
    ranks = ranks_in(tuple([each for block in blocks for each in block.ranges]), world_size)
    if len(ranks) != world_size:
        raise ProtocolError(f"the parts of {len(ranks)} of {world_size} ranks")
    found = [b""] * world_size
    for block in blocks:
        parts, begin = _parts_in(block), 0
        for first, last in block.ranges:
            end = begin + last + 1 - first
            found[first : last + 1] = parts[begin:end]
            begin = end
    return found


def _parts_in(block: _Block) -> list[bytes]:
    num_ranks, data, sizes = block.num_ranks, bytes(block.data), block.sizes
    if len(sizes) == 1 and sizes[0] == len(data):
        return [data] * num_ranks
    if len(sizes) != num_ranks or sum(sizes) != len(data):
        raise ProtocolError(f"{len(sizes)} parts of {num_ranks} ranks in {len(data)} bytes")
    size = sizes[0] if sizes else 0
    if size and sizes.count(size) == num_ranks:
        return [data[begin : begin + size] for begin in range(0, len(data), size)]
    ends = list(accumulate(sizes))
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

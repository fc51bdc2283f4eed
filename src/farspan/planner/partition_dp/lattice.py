"""Prefixes of a graph: sets of groups that hold all that comes before any of them (downsets, "ideals").

A pipeline of contiguous stages is a rising chain of prefixes, from the empty one to all; stage s is what prefix s has
more than prefix s - 1. A chain of n groups has n + 1 prefixes; branches multiply them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lattice", "all_prefixes", "linear_order", "make_lattice"]

IntArray = NDArray[np.intp]
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lattice:
    """Prefixes in an order in which each comes after all that it contains.

    Attributes:
        num_groups: Of the graph.
        prefixes: Each as the bits of a whole number; the first is empty and the last has all groups.
        words: [prefix, word], the same bits in words of 64.
        is_complete: These are all prefixes that the graph has.
    """

    num_groups: int
    prefixes: tuple[int, ...]
    words: Words
    is_complete: bool
    _members: list[NDArray[np.bool_]] = field(default_factory=list[NDArray[np.bool_]], repr=False)

    def members(self) -> NDArray[np.bool_]:
        """[prefix, group]: whether the prefix has the group."""
        if not self._members:
            as_bytes = np.ascontiguousarray(self.words).view(np.uint8).reshape(len(self.prefixes), -1)
            bits = np.unpackbits(as_bytes, axis=1, bitorder="little", count=self.num_groups)
            self._members.append(bits.astype(bool))
        return self._members[0]

    def within(self, start: int, candidates: IntArray) -> IntArray:
        """Returns those of `candidates` that contain prefix `start`."""
        keep = np.ones(len(candidates), dtype=bool)
        for word in range(self.words.shape[1]):
            bits = self.words[start, word]
            if bits:
                keep &= (self.words[candidates, word] & bits) == bits
        return candidates[keep]

    def difference(self, start: int, end: int) -> list[int]:
        """Returns the groups of the stage between two prefixes."""
        bits, groups = self.prefixes[end] & ~self.prefixes[start], list[int]()
        while bits:
            low = bits & -bits
            groups.append(low.bit_length() - 1)
            bits ^= low
        return groups


def make_lattice(num_groups: int, prefixes: Iterable[int], *, is_complete: bool = False) -> Lattice:
    """Returns the lattice of the given prefixes, and the empty and the full one."""
    full = (1 << num_groups) - 1
    ordered = sorted({0, full, *prefixes}, key=lambda prefix: (prefix.bit_count(), prefix))
    num_words = max((num_groups + 63) // 64, 1)
    raw = b"".join(prefix.to_bytes(8 * num_words, "little") for prefix in ordered)
    words = np.frombuffer(raw, dtype="<u8").reshape(len(ordered), num_words)
    return Lattice(num_groups=num_groups, prefixes=tuple(ordered), words=words, is_complete=is_complete)


def all_prefixes(num_groups: int, before: Sequence[tuple[int, int]], *, limit: int) -> list[int] | None:
    """Returns all prefixes of a graph; None if there are more than `limit`."""
    needs, after = [0] * num_groups, [list[int]() for _ in range(num_groups)]
    for a, b in before:
        needs[b] |= 1 << a
        after[a].append(b)
    found = {0: [group for group in range(num_groups) if not needs[group]]}
    layer = dict(found)
    while layer:
        grown: dict[int, list[int]] = {}
        for prefix, ready in layer.items():
            for group in ready:
                larger = prefix | 1 << group
                if larger not in grown:
                    opened = [each for each in after[group] if needs[each] & ~larger == 0]
                    grown[larger] = [each for each in ready if each != group] + opened
            if len(found) + len(grown) > limit:
                return None
        found |= grown
        layer = grown
    return list(found)


def linear_order(
    num_groups: int, before: Sequence[tuple[int, int]], *, keys: Sequence[float] | None = None, depth_first: bool = True
) -> list[int]:
    """Returns one order of the groups in which each comes after all that must be before it.

    Args:
        num_groups: How many there are.
        before: Pairs (g, h): g comes before h.
        keys: Among groups that could come next, the one with the smallest key does; by default the earliest.
        depth_first: Go on with what the last group made possible: branches one after the other, few values open.
    """
    keys = keys if keys is not None else range(num_groups)
    waits, after = [0] * num_groups, [list[int]() for _ in range(num_groups)]
    for a, b in before:
        waits[b] += 1
        after[a].append(b)
    heap = [(0, keys[group], group) for group in range(num_groups) if not waits[group]]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        group = heapq.heappop(heap)[2]
        order.append(group)
        for each in after[group]:
            waits[each] -= 1
            if not waits[each]:
                heapq.heappush(heap, (-len(order) if depth_first else 0, keys[each], each))
    return order

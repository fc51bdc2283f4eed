"""Chooses the quick tier: tests that together reach each block that any test reaches, and notice each known fault.

A test that takes next to nothing is always chosen. For the others greedy cover with weights: the next test is the one
that gives most per processor second. A block that no chosen test reaches counts one; one that is reached counts less
each time, for another test may look at other results of it; a fault that is not noticed yet counts as many blocks. What
tests share is paid once.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.mutants.reached import Map

__all__ = ["Choice", "LeftOut", "choose", "left_out_by_hand", "left_out_lines", "write_list"]

_CHOSEN = "# By benchmarks/mutants: others notice the same for less."
"""What follows this line in the list is written by `select`; what stands before it, by people."""

_BLOCKS_OF_A_FAULT = 200
_WORTH = (1.0, 0.4, 0.2, 0.1)
"""Of a block, the first time that it is reached, the second time, and so on."""
_CHEAP_S = 0.05
_LEAST_COST_S = 0.02
"""A test costs no less: what pytest itself does for it."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """The tests that are not in the quick tier: files, functions, single tests."""

    lines: frozenset[str]

    @classmethod
    def read(cls, file: Path) -> LeftOut:
        """Reads the list; nothing is left out where there is none."""
        lines = file.read_text().splitlines() if file.exists() else []
        return cls(lines=frozenset(line for line in map(str.strip, lines) if line and not line.startswith("#")))

    def __contains__(self, name: str) -> bool:
        return bool(self.lines & {name, name.partition("[")[0], name.partition("::")[0]})

    @property
    def digest(self) -> str:
        """A name of the list."""
        return hashlib.sha256("\n".join(sorted(self.lines)).encode()).hexdigest()[:12]


@dataclass(kw_only=True)
class Choice:
    """The quick tier.

    Attributes:
        chosen: Tests, in the order in which they were chosen.
        cost_s: Processor seconds.
        num_blocks: That they reach.
        num_blocks_of_all: That any test reaches.
        unnoticed: Faults that a test notices, but none of these.
    """

    chosen: list[str] = field(default_factory=list)
    cost_s: float = 0.0
    num_blocks: int = 0
    num_blocks_of_all: int = 0
    unnoticed: list[int] = field(default_factory=list)


def choose(tests: Map, witnesses: Mapping[int, Collection[str]], blocks: int, *, limit_s: float) -> Choice:
    """Chooses tests.

    Args:
        tests: With what they reach and take.
        witnesses: Of each fault that is noticed, the tests that are known to notice it.
        blocks: A bit for each block.
        limit_s: Processor seconds of all.
    """
    masks = {name: mask & blocks for name, mask in tests.whole_masks.items() if tests.tests[name].outcome == "passed"}
    noticed: dict[str, set[int]] = defaultdict(set)
    for fault, names in witnesses.items():
        for name in names:
            noticed[name].add(fault)
    choice = Choice()
    covered, caught, paid = [0] * len(_WORTH), set[int](), set[str]()

    def cost_s(name: str) -> float:
        own = max(tests.tests[name].cpu_s, _LEAST_COST_S)
        return own + sum(each.cpu_s for each in tests.uses_of(tests.tests[name]) if each.name not in paid)

    def gain(name: str) -> float:
        worth, left = 0.0, masks[name]
        for each, value in zip(covered, _WORTH, strict=True):
            worth += value * (left & ~each).bit_count()
            left &= each
        return worth + _BLOCKS_OF_A_FAULT * len(noticed[name] - caught)

    # Gains only get less as tests are chosen, so one that is still the best when it is worked out again is the best.
    heap = [(-gain(name) / cost_s(name) if cost_s(name) > _CHEAP_S else -math.inf, name) for name in masks]
    heapq.heapify(heap)
    chosen: set[str] = set()
    while heap:
        ratio, best = heapq.heappop(heap)
        if best in chosen:
            continue
        is_cheap = ratio == -math.inf
        now = -gain(best) / cost_s(best)
        if not (now or is_cheap) or choice.cost_s + cost_s(best) > limit_s:
            continue
        if not is_cheap and now > ratio and heap and now > heap[0][0]:
            heapq.heappush(heap, (now, best))
            continue
        choice.chosen.append(best)
        choice.cost_s += cost_s(best)
        newly_paid = {each.name for each in tests.uses_of(tests.tests[best])} - paid
        paid |= newly_paid
        for name in masks if newly_paid else ():  # what shares them costs less now
            if name not in chosen and newly_paid & {each.name for each in tests.uses_of(tests.tests[name])}:
                heapq.heappush(heap, (-gain(name) / cost_s(name), name))
        left_over = masks[best]
        for number, each in enumerate(covered):
            covered[number], left_over = each | left_over, left_over & each
        caught |= noticed[best]
        chosen.add(best)
    every = 0
    for mask in masks.values():
        every |= mask
    choice.num_blocks, choice.num_blocks_of_all = covered[0].bit_count(), every.bit_count()
    choice.unnoticed = sorted(fault for fault, names in witnesses.items() if names and fault not in caught)
    return choice


def left_out_by_hand(file: Path) -> str:
    """The part of the list that people write: tests that take too long to be mapped."""
    return file.read_text().partition(_CHOSEN)[0] if file.exists() else ""


def write_list(file: Path, lines: Iterable[str]) -> None:
    """Writes the part of the list that is chosen."""
    file.write_text(f"{left_out_by_hand(file)}{_CHOSEN}\n" + "".join(f"{line}\n" for line in lines))


def left_out_lines(names: Iterable[str], chosen: Collection[str]) -> list[str]:
    """The tests that are not chosen, in as few lines as can be: whole files, whole functions, single tests."""
    files: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        files[name.partition("::")[0]][name.partition("[")[0]].append(name)
    lines: list[str] = []
    for file, functions in files.items():
        if not any(name in chosen for group in functions.values() for name in group):
            lines.append(file)
            continue
        for function, group in functions.items():
            if not any(name in chosen for name in group):
                lines.append(function)
            else:
                lines += [name for name in group if name not in chosen]
    return sorted(lines)

"""Chooses the quick tier: tests that together reach each block that any test reaches, and notice each known fault.

Greedy cover with weights: the next test is the one with the most new blocks per processor second; a fault that is not
noticed yet counts as many blocks. What tests share is paid once.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.mutants.reached import Map

__all__ = ["Choice", "LeftOut", "choose", "left_out_by_hand", "left_out_lines", "write_list"]

_CHOSEN = "# By benchmarks/mutants: others notice the same for less."
"""What follows this line in the list is written by `select`; what stands before it, by people."""

_BLOCKS_OF_A_FAULT = 200
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
    covered, caught, paid = 0, set[int](), set[str]()

    def cost_s(name: str) -> float:
        own = max(tests.tests[name].cpu_s, _LEAST_COST_S)
        return own + sum(each.cpu_s for each in tests.uses_of(tests.tests[name]) if each.name not in paid)

    def gain(name: str) -> int:
        return (masks[name] & ~covered).bit_count() + _BLOCKS_OF_A_FAULT * len(noticed[name] - caught)

    left = {name for name in masks if gain(name)}
    while left:
        gains = {name: gain(name) for name in left}
        left = {name for name in left if gains[name] and choice.cost_s + cost_s(name) <= limit_s}
        if not left:
            break
        best = max(left, key=lambda name: (gains[name] / cost_s(name), name))
        choice.chosen.append(best)
        choice.cost_s += cost_s(best)
        paid |= {each.name for each in tests.uses_of(tests.tests[best])}
        covered |= masks[best]
        caught |= noticed[best]
        left.remove(best)
    every = 0
    for mask in masks.values():
        every |= mask
    choice.num_blocks, choice.num_blocks_of_all = covered.bit_count(), every.bit_count()
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

"""What processes note in a file as they reach points, and the map of the tests that is made of it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Map", "Reached", "MappedTest", "bits", "read_map", "read_reached"]

_OF_ALL = "tests.support.warm."
"""Servers, which all tests share: they are started once, and cost none of them anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What the processes of a test have noted.

    Attributes:
        mask: A bit for each point.
        pids: Of the processes.
        cpu_s: Processor time of the processes that have ended by themselves.
    """

    mask: int
    pids: frozenset[int]
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedTest:
    """A test, or what tests share.

    Attributes:
        name: The node id.
        outcome: "passed", "failed", "skipped", "died".
        wall_s: Alone.
        cpu_s: Alone.
        mask: Of the points that it reaches alone.
        uses: Names of what it shares.
    """

    name: str
    outcome: str
    wall_s: float
    cpu_s: float
    mask: int
    uses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Map:
    """All tests, and what they share.

    Attributes:
        tests: By node id.
        shared: By name.
        collected: A bit for each point that is reached as the tests are collected.
    """

    tests: dict[str, MappedTest]
    shared: dict[str, MappedTest]
    collected: int

    @functools.cached_property
    def whole_masks(self) -> dict[str, int]:
        """The points that each test reaches, with what it shares."""
        return {
            name: _union([test.mask, *(each.mask for each in self.uses_of(test))]) for name, test in self.tests.items()
        }

    def uses_of(self, test: MappedTest) -> list[MappedTest]:
        """What a test shares with others, and what that shares."""
        found: dict[str, MappedTest] = {}
        left = list(test.uses)
        while left:
            name = left.pop()
            if name in self.shared and name not in found:
                found[name] = self.shared[name]
                left += found[name].uses
        return list(found.values())

    def whole_wall_s(self, name: str) -> float:
        """The seconds of a test that runs alone."""
        test = self.tests[name]
        return test.wall_s + sum(each.wall_s for each in self.uses_of(test))

    def whole_cost_s(self, name: str) -> float:
        """The processor seconds of a test that runs alone."""
        test = self.tests[name]
        return test.cpu_s + sum(each.cpu_s for each in self.uses_of(test))


def read_reached(file: Path, *, without_cpu_of: int = 0) -> Reached:
    """Reads what processes have noted; nothing where there is no file."""
    numbers: set[int] = set()
    pids: set[int] = set()
    cpu_s: dict[int, float] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        match line.split():
            case ["pid", pid]:
                pids.add(int(pid))
            case ["cpu", pid, seconds]:
                cpu_s[int(pid)] = float(seconds)
            case [number]:
                numbers.add(int(number))
            case _:
                pass
    cpu_s.pop(without_cpu_of, None)
    return Reached(mask=_mask(numbers), pids=frozenset(pids), cpu_s=sum(cpu_s.values()))


def read_map(files: Iterable[Path]) -> Map:
    """Reads the rows of several files; a later row of a test takes the place of an earlier one."""
    tests: dict[str, MappedTest] = {}
    shared: dict[str, MappedTest] = {}
    collected = 0
    for file in sorted(files):
        for line in file.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # of a process that died as it wrote
            if "collected" in row:
                collected |= int(row["collected"], 16)
                continue
            name = row.get("test") or row["shared"]
            if name.startswith(_OF_ALL):
                continue
            test = MappedTest(
                name=name,
                outcome=row.get("outcome", "passed"),
                wall_s=row["wall_s"],
                cpu_s=row["cpu_s"],
                mask=int(row["reached"], 16),
                uses=tuple(row["uses"]),
            )
            (tests if "test" in row else shared)[test.name] = test
    return Map(tests=tests, shared=shared, collected=collected)


def bits(mask: int) -> set[int]:
    """The numbers of the bits that are set."""
    found: set[int] = set()
    while mask:
        low = mask & -mask
        found.add(low.bit_length() - 1)
        mask ^= low
    return found


def _mask(numbers: Iterable[int]) -> int:
    present = set(numbers)
    data = bytearray(max(present, default=0) // 8 + 1)
    for number in present:
        data[number // 8] |= 1 << number % 8
    return int.from_bytes(data, "little")


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(int.__or__, masks, 0)

"""Profiles and objective of PipeDream (Harlap et al.; Narayanan et al., SOSP 2019), for the library's search.

A state is a set of layers with all that comes before them; its cut holds the layers whose outputs are needed later, as
the authors find them (an antichain, and every layer before it that has another way out). With B the bandwidth of a
level, a stage between two states on m machines takes

    max((compute + 4 (m - 1) / m parameters / B) / m,  2 cut(start) / (B m),  2 cut(end) / (B m))

where the first stage has no cut to pay, and parameters / (machines of the level below).
On a level above the first, a machine is a whole lower level, and compute is the best time there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from farspan.planner.partition_dp.chain import IntArray, StageOption, best_chain
from farspan.planner.partition_dp.lattice import Lattice, all_prefixes, make_lattice

__all__ = ["Profile", "best_time", "read_profile"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A profile as prefixes: cumulative seconds and parameter bytes, bytes over each cut."""

    lattice: Lattice
    seconds: Floats
    parameters: Floats
    cuts: Floats


def read_profile(path: Path) -> Profile:
    """Read a profile; inputs and unused outputs are left out, as the authors do."""
    names: list[str] = []
    words: dict[str, str] = {}
    costs: dict[str, tuple[float, float, float]] = {}
    edges: list[tuple[str, str]] = []
    for line in path.read_text().splitlines():
        parts = line.strip().split(" -- ")
        if line.startswith("\t"):
            edges.append((parts[0], parts[1]))
        elif line.strip():
            names.append(parts[0])
            words[parts[0]] = parts[1]
            costs[parts[0]] = _costs(parts[2])
    inputs = {name for name in names if words[name].startswith("Input") and all(end != name for _, end in edges)}
    edges = [edge for edge in edges if edge[0] not in inputs]
    used = {start for start, _ in edges}
    unused = {name for name in names if words[name].startswith("__getitem__") and name not in used}
    edges = [edge for edge in edges if edge[1] not in unused]
    names = [name for name in names if name not in inputs | unused]
    number = {name: index for index, name in enumerate(names)}
    before = [(number[start], number[end]) for start, end in edges]
    prefixes = all_prefixes(len(names), before, limit=5_000)
    assert prefixes is not None, f"{path.name} has too many states"
    lattice = make_lattice(len(names), prefixes, is_complete=True)
    table = np.array([costs[name] for name in names])
    sums = np.asarray(lattice.members(), dtype=np.float64) @ table
    cuts = _cuts(lattice, before, table[:, 1])
    return Profile(lattice=lattice, seconds=sums[:, 0], parameters=sums[:, 2], cuts=cuts)


def best_time(profile: Profile, machines: Sequence[int], bandwidths: Sequence[float], *, straight: bool) -> float:
    """The best seconds per stage on levels of machines, the innermost first; the last by the library's search."""
    num_states = len(profile.lattice.prefixes)
    compute = np.full((num_states, num_states), math.inf)
    for start in range(num_states):
        ends = profile.lattice.within(start, np.arange(start + 1, num_states))
        compute[start, ends] = profile.seconds[ends] - profile.seconds[start]
    below = 1
    for count, bandwidth in list(zip(machines, bandwidths, strict=True))[:-1]:
        compute = _all_pairs(_Level(profile, compute, count, bandwidth, below, straight))
        below = count
    level = _Level(profile, compute, machines[-1], bandwidths[-1], below, straight)
    chain = best_chain([(level, (machines[-1],))])
    assert chain is not None
    return chain.value


class _Level:
    """What stages cost on one level: `Loads` of the library's search."""

    def __init__(
        self, profile: Profile, compute: Floats, count: int, bandwidth: float, below: int, straight: bool
    ) -> None:
        self.profile, self.compute, self.bandwidth, self.below = profile, compute, bandwidth, below
        self.num_prefixes = len(profile.lattice.prefixes)
        self.num_depths = 1
        self.count = count
        self.options = [
            StageOption(device_class=0, replicas=replicas) for replicas in range(1, 2 if straight else count + 1)
        ]

    def ends(self, start: int) -> IntArray:
        later = np.arange(start + 1, self.num_prefixes)
        return later[np.isfinite(self.compute[start, later])]

    def loads(self, start: int, ends: IntArray) -> list[Floats]:
        return [
            self.stage(start, ends, option.replicas, is_first=start == 0, last=self.num_prefixes - 1)[:, None]
            for option in self.options
        ]

    def stage(self, start: int, ends: IntArray, m: int, *, is_first: bool, last: int) -> Floats:
        """[end] seconds per stage on m machines."""
        parameters = self.profile.parameters[ends] - self.profile.parameters[start]
        sync = 4 * (m - 1) / m * parameters / self.bandwidth
        if is_first:
            return (self.compute[start, ends] + sync / self.below) / m
        moved = np.full(len(ends), self.profile.cuts[start])
        moved = np.maximum(moved, np.where(ends == last, 0.0, self.profile.cuts[ends]))
        return np.maximum((self.compute[start, ends] + sync) / m, 2 * moved / (self.bandwidth * m))


def _all_pairs(level: _Level) -> Floats:
    """[start, end] the best seconds per stage of all that lies between, on all machines of a level."""
    num_states = level.num_prefixes
    best = np.full((level.count + 1, num_states, num_states), math.inf)
    most = len(level.options)
    for start in range(num_states - 1):
        ends = level.ends(start)
        for m in range(1, level.count + 1):  # at most m machines
            alone = [level.stage(start, ends, each, is_first=True, last=-1) for each in range(1, min(m, most) + 1)]
            best[m, start, ends] = np.minimum.reduce(alone)
    for cut in range(1, num_states - 1):
        ends = level.ends(cut)
        starts = np.flatnonzero(np.isfinite(level.compute[:cut, cut]))
        for m in range(1, min(most, level.count - 1) + 1):
            stage = level.stage(cut, ends, m, is_first=False, last=num_states - 1)
            for before in range(1, level.count - m + 1):
                found = np.maximum(best[before, starts, cut][:, None], stage[None, :])
                here = np.ix_(starts, ends)
                best[before + m][here] = np.minimum(best[before + m][here], found)
    return best[level.count]


def _cuts(lattice: Lattice, before: Sequence[tuple[int, int]], sizes: Floats) -> Floats:
    """Bytes over the cut after each state, with the authors' choice of layers."""
    ancestors, after = [0] * lattice.num_groups, [list[int]() for _ in range(lattice.num_groups)]
    for start, end in before:
        after[start].append(end)
    for prefix in lattice.prefixes[:-1]:  # in an order in which all before a layer is known
        for layer in range(lattice.num_groups):
            needs = [start for start, end in before if end == layer]
            if not prefix >> layer & 1 and all(prefix >> each & 1 for each in needs):
                ancestors[layer] = 0
                for each in needs:
                    ancestors[layer] |= ancestors[each] | 1 << each
    cuts: list[float] = []
    for prefix in lattice.prefixes:
        inside = [layer for layer in range(lattice.num_groups) if prefix >> layer & 1]
        antichain = [layer for layer in inside if not any(ancestors[other] >> layer & 1 for other in inside)]
        chosen = set(antichain)
        for layer in antichain:
            for each in inside:
                if ancestors[layer] >> each & 1 and any(
                    other != layer and not ancestors[layer] >> other & 1 for other in after[each]
                ):
                    chosen.add(each)
        cuts.append(float(sum(sizes[layer] for layer in chosen)))
    return np.array(cuts)


def _costs(text: str) -> tuple[float, float, float]:
    """Seconds of forward and backward, bytes of the output, bytes of the parameters."""
    values: dict[str, float] = {}
    for part in text.split(", "):
        key, value = part.split("=")
        values[key] = sum(float(each) for each in value.strip("[]").split("; "))
    seconds = (values["forward_compute_time"] + values["backward_compute_time"]) / 1000.0
    return seconds, values["activation_size"], values["parameter_size"]

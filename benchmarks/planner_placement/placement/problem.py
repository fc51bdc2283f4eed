"""A graph and a cluster as arrays: groups of nodes that stay together, values and device classes.

A value joins the groups that make or use it (its pins). With S(d) the groups on device d,

    load(d) = sum over groups g in S(d) of time[g, d]
            + sum over values with pins both in S(d) and outside it of cost[value, d]

which charges a value once to each device that it leaves or enters (Tarnawski et al., NeurIPS 2020: max-load).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from farspan.cluster import Cluster, DeviceClass
from farspan.errors import PlanError
from farspan.planner.cost_model import CostedGraph
from farspan.planner.cost_model.colocation import FloatArray, colocation_groups, group_nodes, seconds_on
from farspan.units import format_bytes

__all__ = ["Problem", "check_groups", "make_problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What there is to place, and where. `g` counts groups, `v` values, `c` device classes.

    Attributes:
        groups: For each group the indices of its nodes.
        before: Pairs (g, h): g must not lie on a later stage than h.
        time_s: [g, c]; infinite where the class may not run the group.
        memory_bytes: [g].
        pins: For each value its groups, in rising order, at least two.
        cost_s: [v, c].
        counts: [c] devices, as far as there may be something for each to do.
        limits: [c] memory of a device.
        class_names: [c].
    """

    groups: tuple[tuple[int, ...], ...]
    before: tuple[tuple[int, int], ...]
    time_s: FloatArray
    memory_bytes: FloatArray
    pins: tuple[tuple[int, ...], ...]
    cost_s: FloatArray
    counts: tuple[int, ...]
    limits: FloatArray
    class_names: tuple[str, ...]

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @property
    def num_devices(self) -> int:
        return sum(self.counts)

    def class_of_devices(self) -> list[int]:
        """For each device its class; the devices of a class follow each other."""
        return [c for c, count in enumerate(self.counts) for _ in range(count)]

    def loads(self, device_of: Sequence[int]) -> FloatArray:
        """The load of each device; infinite where it has not the memory, or may not run what lies there."""
        classes = self.class_of_devices()
        loads = np.zeros(len(classes))
        memory = np.zeros(len(classes))
        for group, device in enumerate(device_of):
            loads[device] += self.time_s[group, classes[device]]
            memory[device] += self.memory_bytes[group]
        for value, pins in enumerate(self.pins):
            devices = {device_of[pin] for pin in pins}
            if len(devices) > 1:
                for device in devices:
                    loads[device] += self.cost_s[value, classes[device]]
        loads[memory > self.limits[classes]] = math.inf
        return loads

    def max_load(self, device_of: Sequence[int]) -> float:
        return float(self.loads(device_of).max())


def make_problem(
    graph: CostedGraph,
    cluster: Cluster,
    *,
    contiguous: bool,
    is_near: bool = False,
    without_transfers: Collection[str] = (),
) -> Problem:
    """The problem of placing `graph` on `cluster`, by the objective max-load.

    Args:
        graph: What to place.
        cluster: Where.
        contiguous: Stages of a pipeline are wanted: groups on a circle are one group, and groups have an order.
        is_near: Whether a transfer is taken to go to the nearest device, and not to any.
        without_transfers: Names of classes on whose devices transfers take no time.
    """
    group_of, before = group_nodes(graph) if contiguous else (colocation_groups(graph), ())
    num_groups = max(group_of) + 1
    members: list[list[int]] = [[] for _ in range(num_groups)]
    for index, group in enumerate(group_of):
        members[group].append(index)
    classes = cluster.classes
    time_s = np.zeros((num_groups, len(classes)))
    memory = np.zeros(num_groups)
    for node, group in zip(graph.nodes, group_of, strict=True):
        time_s[group] += [seconds_on(node, each) for each in classes]
        memory[group] += node.memory_bytes + node.saved_bytes
    limits = np.array([each.memory_bytes for each in classes])
    time_s[memory[:, None] > limits[None, :]] = math.inf
    pins, cost_s = _values(graph, group_of, cluster, without_transfers, is_near=is_near)
    return Problem(
        groups=tuple(map(tuple, members)),
        before=before,
        time_s=time_s,
        memory_bytes=memory,
        pins=pins,
        cost_s=cost_s,
        counts=tuple(min(each.num_devices, len(graph.nodes)) for each in classes),  # others stay empty
        limits=limits,
        class_names=tuple(each.name for each in classes),
    )


def check_groups(graph: CostedGraph, cluster: Cluster, problem: Problem) -> None:
    """Refuse a group that no device may run.

    Raises:
        PlanError: A group may run on no device, or has more memory than any.
    """
    for group in np.flatnonzero(~np.isfinite(problem.time_s).any(axis=1)):
        nodes = problem.groups[group]
        times = [[seconds_on(graph.nodes[node], each) for each in cluster.classes] for node in nodes]
        _refuse(graph, nodes, float(problem.memory_bytes[group]), np.sum(times, axis=0), cluster.classes)


def _values(
    graph: CostedGraph, group_of: Sequence[int], cluster: Cluster, without_transfers: Collection[str], *, is_near: bool
) -> tuple[tuple[tuple[int, ...], ...], FloatArray]:
    index_of = {node.name: index for index, node in enumerate(graph.nodes)}
    pins_of: dict[tuple[str, str], set[int]] = {}
    costs_of: dict[tuple[str, str], tuple[float, ...]] = {}
    for edge in graph.edges:
        key = (edge.source, edge.value)
        pins_of.setdefault(key, {group_of[index_of[edge.source]]}).add(group_of[index_of[edge.target]])
        costs_of[key] = tuple(
            0.0
            if each.name in without_transfers
            else edge.time_s + edge.size_bytes / cluster.link(each, is_near=is_near) + each.latency_s
            for each in cluster.classes
        )
    merged: dict[tuple[int, ...], FloatArray] = {}
    for key, pins in pins_of.items():
        if len(pins) > 1 and any(costs_of[key]):
            where = tuple(sorted(pins))
            merged[where] = merged.get(where, 0.0) + np.array(costs_of[key])
    cost_s = np.array(list(merged.values())) if merged else np.zeros((0, len(cluster.classes)))
    return tuple(merged), cost_s


def _refuse(
    graph: CostedGraph, nodes: Sequence[int], memory: float, time_s: FloatArray, classes: Sequence[DeviceClass]
) -> None:
    names = ", ".join(f'"{graph.nodes[index].name}"' for index in nodes[:3]) + (", ..." if nodes[3:] else "")
    allowed = [each for each, seconds in zip(classes, time_s, strict=True) if math.isfinite(seconds)]
    if not allowed:
        raise PlanError(
            f"{graph.source}: {names} can run on no device of this cluster.",
            why="none is both allowed and given seconds: " + ", ".join(each.name for each in classes) + ".",
            hint='"devices": [...] of the node, or seconds for that kind of device',
        )
    most = max(each.memory_bytes for each in allowed)
    raise PlanError(
        f"{graph.source}: {names} fits on no device.",
        why=f"together they need {format_bytes(memory)}; the largest device they may use has {format_bytes(most)}.",
        hint="devices of more memory, or finer nodes",
    )

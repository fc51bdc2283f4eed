"""A lower bound for the simulated step: no pipeline is faster, however it is cut and scheduled.

With M micro-batches, t(s) the seconds that stage s takes for each, and T those of a whole micro-batch on the fastest
devices. A device is v times as fast at most. No stage can do more than all the work that falls to it, so

    step >= M * T / sum of v                 all devices, busy all the time
    step >= M * the longest unit            which is on one device; a unit is all that must be together
    step >= the longest path                 of one micro-batch: forwards, then backwards

Gradients of weights can be deferred to any later time: so they count neither as work that waits nor as work that is
waited for. With f(s) the forward in t(s), w(s) the gradients of weights in it, and g(s) = t(s) - w(s): if all nodes
follow from each other, and stages form a chain, stage s waits for the forward of the first micro-batch through the
stages before it, and these for its backward of the last one, while it may have gradients of weights left to do:

    step >= f(1) + ... + f(s - 1) + M * t(s)
    step >= g(1) + ... + g(s - 1) + M * g(s)

and what goes from each of the stages before to the next one adds at least the fastest way to send it, in the second
line also its gradient's way back. So with that many devices of each class, used in any order, stages reach no farther
along the chain than

    reach(n) = max over classes c of    the last node at which both still hold for a stage on c after reach(n - one c),
                                        and a device has the memory for one micro-batch

and no step is shorter than the shortest in which all nodes are reached. The sums over earlier stages are as short as
devices allow: each takes a step's M-th part at most, and the fastest come first. (To have come farther may be worse
where these sums grow fast; a stage is taken to begin wherever that lets it reach the most nodes.)

Where there are not too many cuts, the sums over earlier and later stages are taken on the devices that these are on
(`cuts`); where they are many, only between what is known by then and the step of a plan that was found. A stage's
backwards wait for the forward of the first micro-batch through all stages, and its backward through those after
it: with b(s) the backward in t(s), r(s) that without gradients of weights (if s has parameters: else nothing can be
deferred), F the sum of all forwards, and with what goes over the borders,

    step >= F + r(s + 1) + r(s + 2) + ... + M * b(s)
    step >= F + r(1) + ... + r(s - 1) + r(s + 1) + ... + M * r(s)

Where devices are too many even for the first of these, stages take parts of nodes: no node's f is less than a share p
of its t, so t(s) <= R(s) / M, with R(s) what is left of the step after the stages before, R(s + 1) <= R(s) - p t(s).
Most work is done if all stages take all they may, the fastest first, and the same holds for g, with p = 1:

    T <= step / M * sum over s of v(s) (1 - p / M)^(s - 1)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from farspan.cluster import Cluster, DeviceClass
from farspan.planner.bound.best_cuts import Cuts, Stages
from farspan.planner.bound.bisection import CLOSE, least_step
from farspan.planner.bound.devices import Devices
from farspan.planner.bound.reach import MAX_STATES, Reach, Work
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode
from farspan.planner.cost_model.colocation import FloatArray, seconds_on

__all__ = ["Bound", "bound_of"]

_SAME = 1 - 1e-9
_MOST_STAGES = 1e6
"""Stages that are listed: a class, two places."""
_WORK_AT_ONCE = 2e6
"""Limit on stages tried for one length of a step, each with all choices of devices: some ten milliseconds."""
_WORK_LATER = 3e8
"""The same for a step that is known to be possible: some seconds."""
_CLOSE = 1e-2
"""How close a bound comes then to what it could be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A lower bound for the step.

    Attributes:
        seconds: Of the step.
        reach: What it follows from where all nodes are a chain.
        names: Of the classes of devices.
        cuts: What more follows from, where these were too many to try at once.
    """

    seconds: float
    reach: Reach | None = None
    names: tuple[str, ...] = ()
    cuts: Cuts | None = None

    def below(self, found_s: float) -> float:
        """Returns seconds that no step is below, closer than `seconds` where a step of `found_s` is possible."""
        if self.cuts is None or self.seconds >= found_s or self.cuts.work(found_s) > _WORK_LATER:
            return self.seconds
        return max(self.seconds, _SAME * least_step(self.cuts.may_take, self.seconds, found_s, close=_CLOSE))

    def devices_within(self, step_s: float) -> tuple[str, ...]:
        """Returns classes of devices, in the order of the stages, with which the bound allows a step of so many
        seconds, as few as possible; empty where it knows none.
        """
        found = None if self.reach is None else self.reach.classes_within(step_s)
        return tuple(self.names[number] for number in found or ())


def bound_of(
    graph: CostedGraph,
    cluster: Cluster,
    num_micro_batches: int,
    *,
    num_stages: int | None = None,
    is_chain: bool = True,
    close: float = CLOSE,
) -> Bound:
    """Finds what no step is below, with one device for each stage.

    Args:
        graph: What is run.
        cluster: Where.
        num_micro_batches: Of a step.
        num_stages: The most stages there may be; None for any number.
        is_chain: Whether data flow from each stage only to later ones.
        close: The share by which the bound may be less than it could be.

    Example:
        >>> from farspan.cluster import DeviceClass
        >>> from farspan.planner.cost_model import CostedEdge, CostedNode
        >>> nodes = tuple(CostedNode(name=name, forward_s=1.0, backward_s=2.0) for name in "ab")
        >>> graph = CostedGraph(nodes=nodes, edges=(CostedEdge(source="a", target="b"),))
        >>> cluster = Cluster(classes=(DeviceClass(name="x", kind="x", devices_per_host=2),))
        >>> round(bound_of(graph, cluster, 4).seconds, 2)
        15.0
    """
    classes = cluster.classes
    work = {node.name: [_work(node, each) for each in classes] for node in graph.nodes}
    whole = _least(work, lambda each: each.whole_s)
    waited = _least(work, lambda each: each.waited_s)
    forward = _least(work, lambda each: each.forward_s)
    total = sum(whole.values())
    if not total or not math.isfinite(total):
        return Bound(seconds=0.0)
    units = _seconds_of_units(graph, work)
    longest = max(map(min, units))
    forwards = [edge for edge in graph.edges if not edge.is_parameter]
    backwards = [edge for edge in forwards if edge.has_gradient]
    ends = _ends(forwards, whole)
    is_chain = is_chain and max(ends.values()) >= total * _SAME
    returns = is_chain and max(_ends(backwards, whole).values()) >= total * _SAME
    path = max(*_ends(forwards, forward).values(), *_ends(backwards, waited).values())
    most = min(len(units), num_stages or len(units))
    share = min(each.forward_share for row in work.values() for each in row) if is_chain else 0.0

    def busy(least: Mapping[str, float], of: Callable[[Work], float], part: float) -> float:
        """Returns seconds for all of that work on all devices; `part` of it keeps those after it waiting."""
        rows = {name: [of(each) for each in row] for name, row in work.items()}
        left = 1 - part / num_micro_batches
        return (
            num_micro_batches
            * sum(least.values())
            / sum(v * left**s for s, v in enumerate(_speeds(cluster, least, rows)[:most]))
        )

    least_s = max(
        busy(whole, lambda each: each.whole_s, share),
        busy(waited, lambda each: each.waited_s, 1.0 if returns else 0.0),
        num_micro_batches * longest,
        path,
    )
    names = tuple(each.name for each in classes)
    if not is_chain:
        return Bound(seconds=_SAME * least_s, names=names)
    # What takes next to no time may lie beside the chain.
    order = sorted((name for name in whole if whole[name] > 2 * (1 - _SAME) * total), key=lambda name: ends[name])
    chain = _Chain(
        classes=classes,
        order=order,
        rows=[work[name] for name in order],
        forth_s=[_border_s(order, forwards, cluster, each) for each in classes],
        back_s=[_border_s(order, backwards, cluster, each, is_back=True) for each in classes],
        devices=Devices([min(each.num_devices, most) for each in classes]),
        most=most,
        num_micro_batches=num_micro_batches,
        returns=returns,
    )
    return chain.bound(graph, least_s, names, close)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """The nodes of a graph whose data flow only forwards, in order, and where they may run.

    Attributes:
        classes: Of devices.
        order: Names of the nodes.
        rows: Of each node, its work on each class.
        forth_s: Of each class, the seconds that what passes each border takes from it on.
        back_s: The same of gradients, on their way back.
        devices: How many of each class.
        most: The most stages.
        num_micro_batches: Of a step.
        returns: Whether gradients come back through the whole chain.
    """

    classes: Sequence[DeviceClass]
    order: Sequence[str]
    rows: Sequence[Sequence[Work]]
    forth_s: Sequence[Sequence[float]]
    back_s: Sequence[Sequence[float]]
    devices: Devices
    most: int
    num_micro_batches: int
    returns: bool

    @property
    def num_stages(self) -> int:
        """Returns how many stages there could be: a class, two places."""
        return len(self.classes) * (len(self.order) + 1) ** 2

    def bound(self, graph: CostedGraph, least_s: float, names: tuple[str, ...], close: float) -> Bound:
        """Returns the bound that all ways to cut the chain give; no step is below `least_s` in any case."""
        reach = later = None
        if self.devices.num_states <= MAX_STATES:
            reach = self.reach()
            least_s = least_step(reach.may_take, least_s, close=close)
        if self.devices.num_states <= MAX_STATES and self.num_stages <= _MOST_STAGES:
            cuts = self.cuts(graph)
            if self.devices.num_states * self.num_stages <= _WORK_AT_ONCE:
                least_s = least_step(cuts.may_take, least_s, close=close)
            else:
                later = cuts
        return Bound(seconds=_SAME * least_s, reach=reach, names=names, cuts=later)

    def reach(self) -> Reach:
        """Returns how far along the chain devices get, each with what it takes at least."""
        least = (_least_of_all(self.forth_s), _least_of_all(self.back_s))
        limits = [each.memory_bytes for each in self.classes]
        return Reach(self.rows, self.devices, limits, self.most, self.num_micro_batches, least, returns=self.returns)

    def cuts(self, graph: CostedGraph) -> Cuts:
        """Returns all cuts of the chain, which is of `graph`, into stages."""
        users = {edge.target for edge in graph.edges if edge.is_parameter and edge.has_gradient}
        has_weights = {node.name: node.parameter_bytes > 0 or node.name in users for node in graph.nodes}
        # A node that is no part of the chain may be in any stage, and so may its parameters.
        if any(has_weights[name] for name in set(has_weights).difference(self.order)):
            has_weights = dict.fromkeys(has_weights, True)
        stages = [
            _stages([row[number] for row in self.rows], [has_weights[name] for name in self.order], each)
            for number, each in enumerate(self.classes)
        ]
        forth_s, back_s = np.array(self.forth_s), np.array(self.back_s)
        return Cuts(stages, self.devices, self.most, self.num_micro_batches, forth_s, back_s, returns=self.returns)


def _seconds_of_units(graph: CostedGraph, work: Mapping[str, Sequence[Work]]) -> list[list[float]]:
    """Returns of each unit, the nodes that must stay together, the seconds of all its work on each class of devices."""
    units: dict[str | int, list[float]] = {}
    for number, node in enumerate(graph.nodes):
        key = number if node.together is None else node.together
        seconds = [each.whole_s for each in work[node.name]]
        units[key] = [a + b for a, b in zip(units[key], seconds, strict=True)] if key in units else seconds
    return list(units.values())


def _work(node: CostedNode, kind: DeviceClass) -> Work:
    ways = [node.as_run(name) for name in node.names_of_ways]
    forward = [seconds_on(replace(way, backward_s=0.0), kind) for way in ways]
    backward = [seconds_on(replace(way, forward_s=0.0), kind) for way in ways]
    weights = seconds_on(replace(node, forward_s=0.0, backward_s=node.weight_s), kind)
    whole = [f + b for f, b in zip(forward, backward, strict=True)]
    return Work(
        whole_s=min(whole),
        waited_s=min(
            f + max(0.0, b - weights) if math.isfinite(b) else math.inf for f, b in zip(forward, backward, strict=True)
        ),
        forward_s=min(forward),
        forward_share=min((f / t for f, t in zip(forward, whole, strict=True) if 0 < t < math.inf), default=1.0),
        backward_s=min(backward),
        returned_s=min(max(0.0, b - weights) if math.isfinite(b) else math.inf for b in backward),
        memory_bytes=min(way.least_bytes for way in ways),
    )


def _border_s(
    order: Sequence[str], edges: Sequence[CostedEdge], cluster: Cluster, kind: DeviceClass, *, is_back: bool = False
) -> list[float]:
    """Returns for a border before each node and after the last, the least seconds over it from or to a device of that
    class: for what the node before it makes and the one after it needs.
    """
    place = {name: at for at, name in enumerate(order)}
    fastest = max((_fastest(cluster, kind, other) for other in cluster.classes), default=math.inf)
    least = [0.0] * (len(order) + 1)
    for edge in edges:
        at = place.get(edge.target, 0)
        if at and place.get(edge.source) == at - 1:
            size = edge.sent_back_bytes if is_back else edge.size_bytes
            least[at] = max(least[at], size / fastest + kind.latency_s)
    return least


def _least_of_all(border_s: Sequence[Sequence[float]]) -> float:
    return min((seconds for row in border_s for seconds in row[1:-1]), default=0.0)


def _fastest(cluster: Cluster, one: DeviceClass, other: DeviceClass) -> float:
    """Returns bytes per second between two devices of these classes that are nearest to each other."""
    if one.whole == other.whole:
        return min(cluster.link(one, is_near=True), cluster.link(other, is_near=True))
    return min(cluster.link(one), cluster.link(other))


def _stages(row: Sequence[Work], has_weights: Sequence[bool], kind: DeviceClass) -> Stages:
    """Returns all stages of those nodes on one class."""

    def between(values: Sequence[float]) -> FloatArray:
        sums = np.concatenate([[0.0], np.cumsum([each if math.isfinite(each) else 0.0 for each in values])])
        return np.maximum(sums[None, :] - sums[:, None], 0.0)

    refused = between([0.0 if math.isfinite(each.whole_s) else 1.0 for each in row])
    fits = between([each.memory_bytes for each in row]) <= kind.memory_bytes * (2 - _SAME)
    starts, ends = np.nonzero(np.triu((refused == 0) & fits, 1))
    backward_s = between([each.backward_s for each in row])
    can_split = between([float(each) for each in has_weights]) > 0
    returned_s = np.where(can_split, between([each.returned_s for each in row]), backward_s)
    return Stages(
        starts=starts,
        ends=ends,
        forward_s=between([each.forward_s for each in row])[starts, ends],
        backward_s=backward_s[starts, ends],
        returned_s=returned_s[starts, ends],
        whole_s=between([each.whole_s for each in row])[starts, ends],
    )


def _least(work: Mapping[str, Sequence[Work]], of: Callable[[Work], float]) -> dict[str, float]:
    return {name: min(map(of, row)) for name, row in work.items()}


def _speeds(cluster: Cluster, least: Mapping[str, float], rows: Mapping[str, Sequence[float]]) -> list[float]:
    """Returns by device, the fastest first, how many seconds of the least work it does in one second at most."""
    found: list[float] = []
    for number, each in enumerate(cluster.classes):
        speed = max((least[name] / row[number] for name, row in rows.items() if row[number]), default=1.0)
        found += [speed] * each.num_devices
    return sorted(found, reverse=True)


def _ends(edges: Sequence[CostedEdge], least: Mapping[str, float]) -> dict[str, float]:
    """Returns by name when each unit ends at the earliest."""
    targets: dict[str, list[str]] = {}
    waits = dict.fromkeys(least, 0)
    for source, target in {(edge.source, edge.target) for edge in edges}:
        targets.setdefault(source, []).append(target)
        waits[target] += 1
    ends = dict(least)
    ready = [name for name, count in waits.items() if not count]
    for name in ready:  # grows
        for target in targets.get(name, ()):
            ends[target] = max(ends[target], ends[name] + least[target])
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    return ends

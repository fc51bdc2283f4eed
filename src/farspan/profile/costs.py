"""The profile of a step as a graph with costs, for the devices of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from farspan.cluster import Cluster, DeviceClass, Speeds, speeds_of
from farspan.errors import PlanError
from farspan.planner.cost_model import (
    WHOLE_MODEL,
    CostedEdge,
    CostedGraph,
    CostedNode,
    NodeOption,
    Seconds,
    strongly_connected,
)
from farspan.profile.roofline import roofline_s, speeds_here
from farspan.profile.step import Operation, StepProfile, UnitProfile

__all__ = ["costed_graph", "is_measured", "needs_measuring"]


def is_measured(device_class: DeviceClass, device: str) -> bool:
    """Returns whether seconds measured on `device` stand for those on devices of that class.

    They do where it is of that kind, and where nothing else is known of it: its `speed` then says how they compare.
    """
    return device_class.kind.lower() in device.lower() or speeds_of(device_class) is None


def needs_measuring(cluster: Cluster, device: str) -> bool:
    """Returns whether a plan for `cluster` needs measured seconds."""
    return any(is_measured(each, device) for each in cluster.classes)


def costed_graph(profile: StepProfile, cluster: Cluster, *, roofline: bool = False) -> CostedGraph:
    """Returns the graph with costs that the planner works on.

    Args:
        profile: Of the step.
        cluster: Of which devices the seconds are to be.
        roofline: Do not use what has been measured.

    Raises:
        PlanError: Without measured seconds, a kind of device of which no speed is known.
    """
    speeds: dict[str, Speeds] = {}
    measured: list[DeviceClass] = []
    for each in cluster.classes:
        known = speeds_of(each)
        if not roofline and is_measured(each, profile.device):
            measured.append(each)
        elif known is not None:
            speeds[each.name] = known
        elif each.kind.lower() == "cpu":
            speeds[each.name] = speeds_here()
        else:
            raise PlanError(
                f'how fast a "{each.kind}" is is not known.',
                why="without measuring, a device is known by its speeds.",
                hint='flops = "312 TFLOP/s" and memory_bandwidth = "2 TB/s" in its table of cluster.toml',
            )
    nodes = [_node(unit, measured, speeds) for unit in profile.units]
    groups = _colocation_groups(profile)
    edges = [
        CostedEdge(
            source=_name(profile.units[value.source]),
            target=_name(profile.units[value.target]),
            size_bytes=value.size_bytes,
            value=value.name,
            is_saved=value.is_saved,
            is_saved_there=value.is_saved_there,
            gradient_bytes=value.gradient_bytes,
            is_parameter=value.is_parameter,
        )
        for value in profile.values
        if groups[value.source] is None or groups[value.source] != groups[value.target]
    ]
    return CostedGraph(
        nodes=tuple(replace(nodes[index], together=groups[index]) for index in _order_of_calls(profile)),
        edges=tuple(edges),
        source="the model",
    )


def _order_of_calls(profile: StepProfile) -> list[int]:
    """Returns the units in the order in which the program first calls them; one that is never called comes after the
    unit before it."""
    places: list[tuple[int, int]] = []
    place = 0
    for index, unit in enumerate(profile.units):
        place = place if unit.first_call is None else unit.first_call
        places.append((place, index))
    return [index for _, index in sorted(places)]


def _node(unit: UnitProfile, measured: Sequence[DeviceClass], speeds: Mapping[str, Speeds]) -> CostedNode:
    forward = _seconds(unit.forward_s, unit.forward_work, measured, speeds)
    backward = _seconds(unit.backward_s, unit.backward_work, measured, speeds)
    options: tuple[NodeOption, ...] = ()
    if unit.can_remat and unit.input_bytes < unit.saved_bytes:
        again = NodeOption(
            name="remat",
            forward_s=forward,
            backward_s=_sum(forward, backward),
            parameter_bytes=unit.trained_bytes,
            saved_bytes=unit.input_bytes,
            memory_bytes=unit.memory_bytes,
        )
        options = (again,)
    return CostedNode(
        name=_name(unit),
        forward_s=forward,
        backward_s=backward,
        parameter_bytes=unit.trained_bytes,
        saved_bytes=unit.saved_bytes,
        memory_bytes=unit.memory_bytes,
        working_bytes=unit.working_bytes,
        forward_working_bytes=unit.forward_working_bytes,
        split_working_bytes=unit.split_working_bytes,
        weight_s=_seconds(unit.weight_s, unit.weight_work, measured, speeds),
        weight_flops=unit.weight_flops,
        released_bytes=unit.released_bytes,
        split_released_bytes=unit.split_released_bytes,
        left_bytes=unit.left_bytes,
        shared_bytes=dict(unit.saved_with_others),
        options=options,
    )


def _name(unit: UnitProfile) -> str:
    return unit.name or WHOLE_MODEL


def _seconds(
    seconds: float | None,
    work: Sequence[Operation],
    measured: Sequence[DeviceClass],
    speeds: Mapping[str, Speeds],
) -> Seconds:
    """Returns seconds by the name of the device class; a plain number where all classes are as measured."""
    if not speeds:
        return seconds or 0.0
    found = {name: roofline_s(work, each) for name, each in speeds.items()}
    return found | {each.name: (seconds or 0.0) / each.speed for each in measured}


def _sum(a: Seconds, b: Seconds) -> Seconds:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return {name: a[name] + b[name] for name in a}
    assert not isinstance(a, Mapping) and not isinstance(b, Mapping)
    return a + b


def _colocation_groups(profile: StepProfile) -> list[str | None]:
    """Returns for each unit a label that it shares with those it cannot be separated from; None if it can be from all.

    These are units on a circle; and what the step never uses goes with the unit before it.
    """
    count = len(profile.units)
    component = strongly_connected(count, {(value.source, value.target) for value in profile.values})
    used = {end for value in profile.values for end in (value.source, value.target)}
    used |= {index for index, unit in enumerate(profile.units) if unit.likeness}
    group = list(component)
    for index in range(1, count):
        if index not in used:
            group[index] = group[index - 1]
    return [f"with {_name(profile.units[group.index(each)])}" if group.count(each) > 1 else None for each in group]

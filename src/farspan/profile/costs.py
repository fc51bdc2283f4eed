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
from farspan.profile.step import AtomProfile, Operation, StepProfile

__all__ = ["costed_graph", "is_measured", "needs_measuring"]


def is_measured(device_class: DeviceClass, device: str) -> bool:
    """Whether seconds measured on `device` are to stand for those on devices of that class.

    They do where it is of that kind, and where nothing else is known of it: its `speed` then says how they compare.
    """
    return device_class.kind.lower() in device.lower() or speeds_of(device_class) is None


def needs_measuring(cluster: Cluster, device: str) -> bool:
    """Whether a plan for `cluster` needs measured seconds."""
    return any(is_measured(each, device) for each in cluster.classes)


def costed_graph(profile: StepProfile, cluster: Cluster, *, roofline: bool = False) -> CostedGraph:
    """What the planner wants to know of a step.

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
    nodes = [_node(atom, measured, speeds) for atom in profile.atoms]
    words = _words(profile)
    edges = [
        CostedEdge(
            source=_name(profile.atoms[value.source]),
            target=_name(profile.atoms[value.target]),
            size_bytes=value.size_bytes,
            value=value.name,
            is_saved=value.is_saved,
            is_saved_there=value.is_saved_there,
            gradient_bytes=value.gradient_bytes,
            is_parameter=value.is_parameter,
        )
        for value in profile.values
        if words[value.source] is None or words[value.source] != words[value.target]
    ]
    return CostedGraph(
        nodes=tuple(replace(nodes[index], together=words[index]) for index in _order_of_calls(profile)),
        edges=tuple(edges),
        source="the model",
    )


def _order_of_calls(profile: StepProfile) -> list[int]:
    """The atoms in the order in which the program first calls them; what it never calls after the atom before it."""
    places: list[tuple[int, int]] = []
    place = 0
    for index, atom in enumerate(profile.atoms):
        place = place if atom.first_call is None else atom.first_call
        places.append((place, index))
    return [index for _, index in sorted(places)]


def _node(atom: AtomProfile, measured: Sequence[DeviceClass], speeds: Mapping[str, Speeds]) -> CostedNode:
    forward = _seconds(atom.forward_s, atom.forward_work, measured, speeds)
    backward = _seconds(atom.backward_s, atom.backward_work, measured, speeds)
    options: tuple[NodeOption, ...] = ()
    if atom.can_remat and atom.input_bytes < atom.saved_bytes:
        again = NodeOption(
            name="remat",
            forward_s=forward,
            backward_s=_sum(forward, backward),
            parameter_bytes=atom.trained_bytes,
            saved_bytes=atom.input_bytes,
            memory_bytes=atom.memory_bytes,
        )
        options = (again,)
    return CostedNode(
        name=_name(atom),
        forward_s=forward,
        backward_s=backward,
        parameter_bytes=atom.trained_bytes,
        saved_bytes=atom.saved_bytes,
        memory_bytes=atom.memory_bytes,
        working_bytes=atom.working_bytes,
        forward_working_bytes=atom.forward_working_bytes,
        halved_working_bytes=atom.halved_working_bytes,
        weight_s=_seconds(atom.weight_s, atom.weight_work, measured, speeds),
        weight_flops=atom.weight_flops,
        let_go_bytes=atom.let_go_bytes,
        halved_let_go_bytes=atom.halved_let_go_bytes,
        left_bytes=atom.left_bytes,
        shared_bytes=dict(atom.saved_with_others),
        options=options,
    )


def _name(atom: AtomProfile) -> str:
    return atom.name or WHOLE_MODEL


def _seconds(
    seconds: float | None,
    work: Sequence[Operation],
    measured: Sequence[DeviceClass],
    speeds: Mapping[str, Speeds],
) -> Seconds:
    """By name of the class; plain where all are as measured."""
    if not speeds:
        return seconds or 0.0
    found = {name: roofline_s(work, each) for name, each in speeds.items()}
    return found | {each.name: (seconds or 0.0) / each.speed for each in measured}


def _sum(a: Seconds, b: Seconds) -> Seconds:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return {name: a[name] + b[name] for name in a}
    assert not isinstance(a, Mapping) and not isinstance(b, Mapping)
    return a + b


def _words(profile: StepProfile) -> list[str | None]:
    """For each atom a word that it shares with those it cannot be separated from; None where it can from all.

    These are atoms on a circle; and what the step never uses goes with the atom before it.
    """
    count = len(profile.atoms)
    component = strongly_connected(count, {(value.source, value.target) for value in profile.values})
    used = {end for value in profile.values for end in (value.source, value.target)}
    used |= {index for index, atom in enumerate(profile.atoms) if atom.likeness}
    group = list(component)
    for index in range(1, count):
        if index not in used:
            group[index] = group[index - 1]
    return [f"with {_name(profile.atoms[group.index(each)])}" if group.count(each) > 1 else None for each in group]

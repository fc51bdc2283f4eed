"""The profile of a step as a graph with costs."""

from __future__ import annotations

import pytest

from farspan.cluster import Cluster, DeviceClass
from farspan.errors import PlanError
from farspan.planner import read_graph
from farspan.planner.cost_model import write_graph
from farspan.profile import Operation, PassedValue, StepProfile, UnitProfile, costed_graph, needs_measuring

WORK = (
    Operation(flops=6e11, moved_bytes=8.0, dtype="float32"),
    Operation(flops=1.0, moved_bytes=8e10, dtype="float32"),
)


def profile(device: str = "cpu") -> StepProfile:
    units = [
        UnitProfile(
            name=f"blocks.{i}",
            forward_s=1.0,
            backward_s=2.0,
            forward_work=WORK,
            backward_work=(*WORK, *WORK),
            saved_bytes=100.0,
            input_bytes=10.0,
            trained_bytes=4.0,
            memory_bytes=16.0,
            likeness="block",
            can_remat=True,
        )
        for i in range(3)
    ]
    unused = UnitProfile(name="unused", memory_bytes=8.0)
    values = tuple(PassedValue(source=i, target=i + 1, size_bytes=10.0, name=f"x{i}") for i in range(2))
    return StepProfile(units=(*units, unused), values=values, num_micro_batches=4, device=device)


def cluster(*classes: DeviceClass) -> Cluster:
    return Cluster(classes=classes)


def test_measured_seconds_stand_for_devices_of_which_nothing_else_is_known() -> None:
    here, like_it = DeviceClass(name="here", kind="cpu"), DeviceClass(name="other", kind="toaster", speed=2.0)
    node = costed_graph(profile(), cluster(here, like_it)).nodes[0]
    assert (node.forward_s, node.backward_s) == (1.0, 2.0)
    assert needs_measuring(cluster(here), "cpu") and needs_measuring(cluster(like_it), "cpu")


def test_known_devices_take_what_their_work_takes() -> None:
    new = DeviceClass(name="new", kind="chip", flops_per_s=1e12, memory_bytes_per_s=1e11)
    node = costed_graph(profile(), cluster(new)).nodes[0]
    assert node.forward_s == {"new": pytest.approx(2.0)} and node.backward_s == {"new": pytest.approx(4.0)}
    assert not needs_measuring(cluster(new), "cpu")
    assert not needs_measuring(cluster(DeviceClass(name="a", kind="H100")), "cpu")
    assert needs_measuring(cluster(DeviceClass(name="a", kind="H100")), "NVIDIA H100 80GB HBM3")


def test_both_in_one_cluster() -> None:
    here = DeviceClass(name="here", kind="cpu", speed=0.5)
    new = DeviceClass(name="new", kind="chip", flops_per_s=1e12, memory_bytes_per_s=1e11)
    assert costed_graph(profile(), cluster(here, new)).nodes[0].forward_s == {"here": 2.0, "new": pytest.approx(2.0)}


def test_remat_is_an_option_of_what_is_called() -> None:
    (option,) = costed_graph(profile(), cluster(DeviceClass(name="here", kind="cpu"))).nodes[0].options
    assert (option.name, option.forward_s, option.backward_s, option.saved_bytes) == ("remat", 1.0, 3.0, 10.0)


def test_what_is_never_used_goes_with_what_is_before_it() -> None:
    graph = costed_graph(profile(), cluster(DeviceClass(name="here", kind="cpu")))
    assert [node.together for node in graph.nodes] == [None, None, "with blocks.2", "with blocks.2"]


def test_a_device_of_which_nothing_is_known_cannot_be_counted_on() -> None:
    with pytest.raises(PlanError, match='how fast a "toaster" is'):
        costed_graph(profile(), cluster(DeviceClass(name="a", kind="toaster")), roofline=True)


def test_the_graph_can_be_written_and_read(tmp_path) -> None:
    graph = costed_graph(profile(), cluster(DeviceClass(name="here", kind="cpu")))
    (tmp_path / "graph.json").write_text(write_graph(graph))
    again = read_graph(tmp_path / "graph.json")
    assert (again.nodes, again.edges) == (graph.nodes, graph.edges)

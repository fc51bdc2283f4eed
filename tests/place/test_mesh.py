"""A mesh that the program has made, in the place of three arguments."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.ranks import run_processes
from torch import nn

from farspan.errors import PlanError
from farspan.place.mesh.given import axes_of
from farspan.place.mesh.lanes import _shares_of, cut_batches
from farspan.plan import Plan
from farspan.record.lanes.batches import Batches

PROGRAM = """
import torch, farspan
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
model = farspan.distribute(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(2)]), mesh=mesh)
model(torch.ones(2, 8)).square().mean().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
print(*farspan.plan_of(model).stages)
"""


@dataclass
class Mesh:
    """What is read of one of torch's."""

    mesh: torch.Tensor
    mesh_dim_names: tuple[str, ...] | None


def test_a_mesh_of_torchs(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    for process in run_processes(2, script):
        assert process.code == 0, process.stderr
        assert "rank:0&rank:1" in process.stdout


@pytest.mark.parametrize(
    ("shape", "names", "axes"),
    [
        ((2, 3, 2), ("dp", "pp", "tp"), (2, 3, 2)),
        ((4, 3), ("pp", "tp"), (1, 4, 3)),
        ((12,), ("dp",), (12, 1, 1)),
    ],
)
def test_axes(shape: tuple[int, ...], names: tuple[str, ...], axes: tuple[int, ...]) -> None:
    assert axes_of(Mesh(torch.arange(12).view(shape), names), 12) == axes


@pytest.mark.parametrize(
    ("mesh", "given", "said"),
    [
        (3, {}, "is no DeviceMesh"),
        (Mesh(torch.arange(4), None), {}, "axes are named"),
        (Mesh(torch.arange(4), ("fsdp",)), {}, "axes are named"),
        (Mesh(torch.arange(2), ("dp",)), {}, "of 4"),
        (Mesh(torch.arange(4).view(2, 2), ("tp", "dp")), {}, "in order"),
        (Mesh(torch.arange(4), ("dp",)), {"stages": 2}, "mesh= with stages="),
    ],
)
def test_a_mesh_that_cannot_be(mesh: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        axes_of(mesh, 4, **given)
    assert said in str(caught.value) and caught.value.hint


@pytest.mark.parametrize(
    ("estimates", "found"),
    [({"share": (3.0, 1.0)}, [3.0, 1.0]), ({}, [1.0, 1.0]), ({"share": (0.0, 0.0)}, [1.0, 1.0])],
)
def test_the_number_of_micro_batches_follows_from_the_shares_of_the_stages(
    estimates: dict[str, tuple[float, ...]], found: list[float]
) -> None:
    plan = Plan(stages=("rank:0", "rank:1"), placement={"a": 0, "b": 1}, estimates=estimates)
    assert list(_shares_of(plan)) == found


@pytest.mark.parametrize(("layer", "is_asked"), [(nn.LayerNorm(8), True), (nn.BatchNorm1d(8), False)])
def test_micro_batches_are_not_hinted_at_where_the_rows_of_a_batch_depend_on_each_other(
    layer: nn.Module, is_asked: bool
) -> None:
    engine: Any = SimpleNamespace(console=SimpleNamespace(best_lanes=None), recorder=SimpleNamespace(batches=Batches()))
    cut_batches(engine, nn.Sequential(nn.Linear(8, 8), layer), Plan.from_mapping({"": "rank:0"}), None)
    assert (engine.console.best_lanes is not None) == is_asked

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from farspan.errors import PlanError
from farspan.plan.hints import Hints
from farspan.planner import Unit, auto_plan

BLOCKS = [
    Unit(name="embed", cost=0.0, num_parameters=100, parameter_bytes=400),
    *(Unit(name=f"blocks.{i}", cost=1.0, num_parameters=10, parameter_bytes=40) for i in range(4)),
    Unit(name="head", cost=0.1, num_parameters=5, parameter_bytes=20),
]
RANKS = ["rank:0", "rank:1", "rank:2"]


def test_equal_blocks_are_shared_out_equally() -> None:
    plan = auto_plan(BLOCKS, num_stages=2, devices=RANKS[:2])
    assert plan.stages == ("rank:0", "rank:1")
    assert plan.placement == {"embed": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "head": 1}
    assert plan.estimates == {
        "num_parameters": (120, 25),
        "parameter_bytes": (480, 100),
        "share": (0.4878, 0.5122),
    }


def test_stages_go_round_the_devices() -> None:
    plan = auto_plan(BLOCKS, num_stages=5, devices=RANKS)
    assert plan.stages == ("rank:0", "rank:1", "rank:2", "rank:0", "rank:1")
    assert set(plan.placement.values()) == set(range(5))


def test_one_stage_owns_the_whole_model_even_without_units() -> None:
    assert auto_plan(BLOCKS, num_stages=1, devices=RANKS).placement == {"": 0}
    assert auto_plan([], num_stages=1, devices=RANKS).placement == {"": 0}


def test_a_block_is_cut_only_where_that_pays() -> None:
    halves = [
        Unit(name=f"blocks.{i}.{part}", cost=cost) for i in range(2) for part, cost in (("attn", 1.0), ("mlp", 1.04))
    ]
    assert auto_plan(halves, num_stages=2, devices=RANKS[:2]).placement == {"blocks.0": 0, "blocks.1": 1}
    halves = [Unit(name=f"blocks.{i}.{part}", cost=1.0) for i in range(3) for part in ("attn", "mlp")]
    assert auto_plan(halves, num_stages=2, devices=RANKS[:2]).placement == {
        "blocks.0": 0,
        "blocks.1.attn": 0,
        "blocks.1.mlp": 1,
        "blocks.2": 1,
    }


def test_the_parts_of_a_cut_block_that_stay_whole_are_one_entry() -> None:
    parts = [Unit(name=f"net.0.{name}", cost=1.0) for name in ("attn.qkv", "attn.out", "mlp.0", "mlp.1")]
    assert auto_plan(parts, num_stages=2, devices=RANKS[:2]).placement == {"net.0.attn": 0, "net.0.mlp": 1}


def test_fewer_units_than_stages_is_a_plan_error_with_their_names() -> None:
    with pytest.raises(PlanError) as caught:
        auto_plan(BLOCKS[:2], num_stages=3, devices=RANKS)
    assert caught.value.what == "no plan has 3 stages for this model."
    assert "2 modules with parameters" in caught.value.why
    assert "'blocks.0'" in caught.value.why
    assert caught.value.hint == (
        "farspan.distribute(model, stages=2), whose stages have several ranks; or farspan run -n 2, or data_parallel=3"
    )
    assert auto_plan(BLOCKS[:2], num_stages=2, devices=RANKS).num_stages == 2
    with pytest.raises(PlanError) as caught:  # pins need a stage on each rank
        auto_plan(BLOCKS[:2], num_stages=3, devices=RANKS, hints=Hints(pins={"blocks.0": "rank:0"}))
    assert caught.value.hint == "farspan run -n 2, or data_parallel=3"


@pytest.mark.parametrize(
    ("devices", "hints", "hint"),
    [
        (RANKS[:2], Hints(stages=9), "farspan.distribute(model, stages=6)"),
        (
            [f"rank:{rank}" for rank in range(8)],
            Hints(stages=9),
            "farspan.distribute(model, stages=6), whose stages have several ranks",
        ),
        (
            [f"rank:{rank}" for rank in range(9)],
            Hints(stages=9, max_memory="1GB"),
            "farspan.distribute(model, stages=6) and farspan run -n 6",
        ),
        (
            [f"rank:{2 * stage}+rank:{2 * stage + 1}" for stage in range(9)],
            None,
            "farspan run -n 12, or data_parallel=9",
        ),
    ],
)
def test_what_is_advised_for_too_many_stages_works(devices: list[str], hints: Hints | None, hint: str) -> None:
    with pytest.raises(PlanError) as caught:
        auto_plan(BLOCKS, num_stages=9, devices=devices, hints=hints)
    assert caught.value.hint == hint
    if hint.startswith("farspan.distribute"):
        devices = devices[:6] if hint.endswith("-n 6") else devices
        hints = replace(hints or Hints(), stages=6)
        assert auto_plan(BLOCKS, num_stages=6, devices=devices, hints=hints).num_stages == 6


@pytest.mark.parametrize(("num_stages", "devices"), [(0, RANKS), (1, [])])
def test_no_stages_or_no_devices_is_a_plan_error(num_stages: int, devices: list[str]) -> None:
    with pytest.raises(PlanError, match="no plan has"):
        auto_plan(BLOCKS, num_stages=num_stages, devices=devices)


def test_planning_does_not_import_torch() -> None:
    script = "import sys, farspan.planner, farspan.plan, farspan.units; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

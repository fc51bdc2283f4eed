"""`plan.explain("blocks.7")`."""

from __future__ import annotations

import pytest

from farspan.errors import PlanError
from farspan.plan import Plan, resolve

PLAN = Plan(
    stages=("rank:0", "rank:1"),
    placement={"*": 0, "blocks.*": 1, "blocks.1": 0, "blocks.2.mlp": 0},
    estimates={"parameter_bytes": [1024, 2048], "peak_bytes": [4096, 8192], "busy": [0.5, 0.25]},
)


@pytest.mark.parametrize("name", ["embed", "blocks.0", "blocks.1", "blocks.1.mlp", "blocks.2.mlp", "blocks.2.norm"])
def test_it_says_the_stage_that_the_plan_means(name) -> None:
    parameters = [f"{name}.weight"]
    names = ["", "embed", "blocks", *(f"blocks.{i}{part}" for i in range(4) for part in ("", ".mlp", ".norm"))]
    parameters = [f"{each}.weight" for each in names if each and each != "blocks"]
    found = resolve(PLAN, parameters=parameters, aliases={}, modules=names, world_size=2)
    assert f"{name} lies on stage {found.name_stage[f'{name}.weight']}, " in PLAN.explain(name)


def test_it_says_why_and_what_the_stage_takes() -> None:
    assert PLAN.explain("blocks.1.mlp").splitlines() == [
        "blocks.1.mlp lies on stage 0, rank:0, by the entry 'blocks.1'",
        "  beside it: *, blocks.2.mlp",
        "  the stage: size 1.0 KiB, peak memory 4.0 KiB, expected busy 50 %",
    ]
    assert Plan(stages=("rank:0",), placement={"": 0}).explain("") == (
        "the whole model lies on stage 0, rank:0, by the entry ''\n  nothing else lies there"
    )


def test_a_name_that_no_entry_means_is_an_error() -> None:
    plan = Plan(stages=("rank:0", "rank:1"), placement={"blocks.0": 0, "blocks.1": 1})
    with pytest.raises(PlanError, match=r"its parts lie apart: blocks\.0-blocks\.1"):
        plan.explain("blocks")
    with pytest.raises(PlanError, match="there is no such name"):
        plan.explain("head")

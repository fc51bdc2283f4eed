from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from tests.documents.edits import edited, try_to_read

from farspan.errors import PlanError
from farspan.plan import Plan

PLAN = Plan(
    stages=("rank:0", "rank:1/cuda:0", "rank:0/cpu"),
    placement={"embed": 0, "blocks.*": 1, "blocks.0": 0, "head.weight": 2},
    schedule="1f1b",
    lookahead=3,
    estimates={
        "num_parameters": (10, 20_000_000, 5),
        "parameter_bytes": (40, 80_000_000, 20),
        "share": (0.1, 0.8, 0.1),
    },
)


def test_json_round_trip_keeps_everything_in_order() -> None:
    read = Plan.from_json(PLAN.to_json())
    assert read == PLAN
    assert list(read.placement) == list(PLAN.placement)
    assert read.estimates == PLAN.estimates
    assert read.to_json() == PLAN.to_json()


def test_file_round_trip(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(str(tmp_path / "plan.json")) == PLAN


def test_json_is_readable_with_one_placement_per_line() -> None:
    text = Plan.from_mapping({"embed": "rank:0", "blocks.*": "rank:1"}).to_json()
    assert text == (
        '{\n  "format": "farspan-plan/1",\n  "stages": [\n    "rank:0",\n    "rank:1"\n  ],\n'
        '  "schedule": "auto",\n  "lookahead": 2,\n'
        '  "placement": {\n    "embed": 0,\n    "blocks.*": 1\n  }\n}\n'
    )


def test_only_the_essentials_are_needed_in_a_file() -> None:
    text = '{"format": "farspan-plan/1", "stages": ["rank:0"], "placement": {"": 0}}'
    assert Plan.from_json(text) == Plan(stages=("rank:0",), placement={"": 0})


def _edited(**changes: Any) -> str:
    values = {**json.loads(PLAN.to_json()), **changes}
    return json.dumps({key: value for key, value in values.items() if value is not ...})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (_edited(shedule="1f1b"), "shedule"),
        (_edited(format="farspan-plan/2"), "format"),
        (_edited(format=...), "format"),
        (_edited(stages=...), "stages"),
        (_edited(stages="rank:0"), "stages"),
        (_edited(stages=[0]), "stages"),
        (_edited(stages=["rank:x"]), "stages"),
        (_edited(stages=[]), "stages"),
        (_edited(placement={}), "placement"),
        (_edited(placement=["embed"]), "placement"),
        (_edited(placement={"embed": 3}), "embed"),
        (_edited(placement={"embed": -1}), "embed"),
        (_edited(placement={"embed": True}), "embed"),
        (_edited(placement={"embed": "rank:0"}), "embed"),
        (_edited(schedule="1f2b"), "schedule"),
        (_edited(schedule=None), "schedule"),
        (_edited(lookahead=-1), "lookahead"),
        (_edited(lookahead=1.5), "lookahead"),
        (_edited(lookahead=10**9), "lookahead"),
        (_edited(stages=["rank:0", "rank:99999999999", "rank:2"]), "stages"),
        (_edited(stages=["rank:" + "9" * 5000, "rank:1", "rank:2"]), "stages"),
        (_edited(stages=["rank:0", "", "rank:2"]), "stages"),
        (_edited(stages=["rank:\u0660", "rank:1", "rank:2"]), "stages"),
        (_edited(estimates={"": [0, 0, 0]}), "estimates"),
        (_edited(estimates={"share": [0, 0, -1]}), "estimates.share"),
        (_edited(estimates={"share": [0, 0, 10**39]}), "estimates.share"),
        (_edited(remat=1), "remat"),
        (_edited(remat=["blocks.0", 1]), "remat"),
        (PLAN.to_json().replace('"lookahead": 3', '"lookahead": 1e999'), "1e999"),
        ("[" * 100_000, "deep"),
        (_edited(estimates={"share": [1.0]}), "estimates.share"),
        (_edited(estimates={"share": ["a", 0, 0]}), "estimates.share"),
        (_edited(estimates=[1, 2, 3]), "estimates"),
        (PLAN.to_json().replace('"blocks.0"', '"embed"'), "embed"),
        ("[]", "plan"),
        ("", "JSON"),
        ('{"format": "farspan-plan/1",}', "line 1"),
    ],
)
def test_a_mistake_in_a_file_names_the_key_and_the_file(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "edited.json"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(path) in caught.value.what
    assert named in str(caught.value)
    assert caught.value.hint
    assert len(str(caught.value).splitlines()) <= 8


def test_a_mistyped_key_is_answered_with_the_right_one() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(_edited(shedule="1f1b"))
    assert caught.value.hint == '"schedule"'


@given(edited(PLAN.to_json()))
@settings(derandomize=True, max_examples=300)
def test_no_edit_of_a_file_is_more_than_an_error(text: str) -> None:
    plan = try_to_read(Plan.from_json, text)
    if plan is not None:
        assert Plan.from_json(plan.to_json()) == plan and len(str(plan)) < 2000


def test_a_file_that_is_not_there_is_a_plan_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nowhere\.json cannot be read"):
        Plan.load(tmp_path / "nowhere.json")


def test_a_mapping_makes_one_stage_per_device_in_order_of_rank_then_appearance() -> None:
    plan = Plan.from_mapping({"d": "rank:1/cuda:1", "a": "rank:0", "b": "rank:1/cuda:0", "c": "rank:1/cuda:1"})
    assert plan.stages == ("rank:0", "rank:1/cuda:1", "rank:1/cuda:0")
    assert plan.placement == {"d": 1, "a": 0, "b": 2, "c": 1}
    assert list(plan.placement) == ["d", "a", "b", "c"]


def test_an_empty_mapping_is_a_plan_error() -> None:
    with pytest.raises(PlanError, match="the plan is empty"):
        Plan.from_mapping({})


def test_ranks_are_those_of_the_stages() -> None:
    assert (PLAN.num_stages, PLAN.num_ranks, PLAN.ranks) == (3, 2, {0, 1})
    assert [PLAN.rank_of(stage) for stage in range(3)] == [0, 1, 0]


def test_estimates_do_not_count_and_order_does() -> None:
    bare = Plan(stages=PLAN.stages, placement=PLAN.placement, schedule="1f1b", lookahead=3)
    assert bare == PLAN
    assert hash(bare) == hash(PLAN)
    turned = Plan(
        stages=PLAN.stages, placement=dict(reversed(list(PLAN.placement.items()))), schedule="1f1b", lookahead=3
    )
    assert turned != PLAN
    assert PLAN != "a plan"


def test_a_plan_is_a_value() -> None:
    placement = {"a": 0}
    plan = Plan(stages=("rank:0",), placement=placement)
    placement["b"] = 0
    assert plan.placement == {"a": 0}
    assert pickle.loads(pickle.dumps(PLAN)) == copy.deepcopy(PLAN) == PLAN


def test_prints_as_a_table() -> None:
    assert str(PLAN).splitlines() == [
        "3 stages on 2 ranks, 1f1b schedule",
        "stage  where          what             parameters      size  share",
        "    0  rank:0         embed, blocks.0          10      40 B   10 %",
        "    1  rank:1/cuda:0  blocks.*             20.0 M  76.3 MiB   80 %",
        "    2  rank:0/cpu     head.weight               5      20 B   10 %",
    ]


def test_the_table_compresses_runs_and_leaves_out_what_is_not_known() -> None:
    names = ["blocks.9", "blocks.10", "blocks.11", "norm", "blocks.13", "0", "1"]
    plan = Plan(stages=("rank:0", "rank:1"), placement={**dict.fromkeys(names, 0), "": 1})
    assert str(plan).splitlines() == [
        "2 stages on 2 ranks, auto schedule",
        "stage  where   what",
        "    0  rank:0  blocks.9-blocks.11, norm, blocks.13, 0-1",
        "    1  rank:1  (the whole model)",
    ]


def test_the_table_wraps_long_lists() -> None:
    names = [f"decoder.layer_{letter}" for letter in "abcdefghij"]
    plan = Plan(stages=("rank:0",), placement=dict.fromkeys(names, 0))
    assert max(map(len, str(plan).splitlines())) <= 80
    assert all(name in str(plan) for name in names)

"""Hints of `distribute`: where things lie then, and that the numbers stay those of one process."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.cases import CASES
from tests.support.parity import build, train, train_plainly
from tests.support.ranks import run_threads

import farspan
from farspan.errors import PlanError

HINTS: dict[str, dict[str, Any]] = {
    "pins": {"pins": {"blocks.*": "rank:1", "blocks.0": "rank:0"}},
    "a part of a block": {"pins": {"blocks.1": "rank:1", "blocks.1.mlp": "rank:0"}},
    "together": {"together": [["embed", "head"]]},
    "together, and pinned": {"together": [["embed", "head"]], "pins": {"head": "rank:1", "blocks.*": "rank:0"}},
    "memory": {"max_memory": {"rank:0": "12kB"}},
}


def places(num_ranks: int, **arguments: Any) -> dict[str, str]:
    """Where the plan of a GPT puts what."""
    models = [build(CASES["gpt_tied"]) for _ in range(num_ranks)]
    plans = run_threads(num_ranks, lambda rank: farspan.plan_of(farspan.distribute(models[rank], **arguments)))
    return {name: plans[0].stages[stage] for name, stage in plans[0].placement.items()}


def test_what_is_asked_for_is_where_it_is_asked_for() -> None:
    assert places(2, pins={"blocks.*": "rank:1", "blocks.0": "rank:0"}) == {
        "embed": "rank:0",
        "position": "rank:0",
        "blocks.0": "rank:0",
        **{f"blocks.{i}": "rank:1" for i in (1, 2, 3)},
        "norm": "rank:1",
        "head": "rank:1",
    }
    found = places(3, together=[["embed", "head"]])
    assert found["embed"] == found["head"] and set(found.values()) == {"rank:0", "rank:1", "rank:2"}
    plainly = places(2)
    assert plainly["blocks.0"] == "rank:0" and "blocks.1.mlp" not in plainly
    found = places(2, pins={"blocks.0": "rank:0", "blocks.0.mlp": "rank:1"})
    assert found["blocks.0.mlp"] == "rank:1" and found["blocks.0.norm1"] == "rank:0"


def test_hints_belong_to_automatic_plans() -> None:
    for hints in HINTS.values():
        with pytest.raises(PlanError, match="pins, together and max_memory are for automatic plans"):
            places(2, plan={"": "rank:0"}, **hints)


def test_hints_that_cannot_be_are_errors_on_every_rank() -> None:
    for hints, said in (
        ({"pins": {"blocks.9": "rank:0"}}, r"the hint 'blocks\.9' matches nothing"),
        ({"pins": {"head": "rank:7"}}, "there is no rank 7"),
        ({"max_memory": "1kB"}, "no plan keeps the hint max_memory='1kB'"),
        ({"stages": 4, "max_memory": "1GiB"}, "stages=4 on 2 ranks cannot be planned"),
    ):
        with pytest.raises(PlanError, match=said):
            places(2, **hints)


@pytest.mark.parametrize("hints", HINTS.values(), ids=HINTS)
def test_the_same_numbers_under_hints(hints: dict[str, Any]) -> None:
    case, num_ranks = CASES["gpt_tied"], 2
    wanted = train_plainly(case)
    models = [build(case) for _ in range(num_ranks)]
    histories = run_threads(num_ranks, lambda rank: train(farspan.distribute(models[rank], **hints), case))
    for rank, history in enumerate(histories):
        assert history.differences(wanted) == [], f"rank {rank}"

"""Models built without data, over several processes: each makes its part, and all goes on as ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_processes
from torch import nn

import farspan

PROGRAM = Path(__file__).parent / "program.py"


def run(num_ranks: int, way: str, options: dict[str, Any] | None = None, *, apart: int = 0) -> list[dict[str, Any]]:
    ended = run_processes(num_ranks, PROGRAM, [way, "4", json.dumps(options or {}), str(apart)])
    assert all(each.code == 0 for each in ended), ended[0].stderr + ended[-1].stderr
    return [json.loads(each.stdout.splitlines()[-1]) for each in ended]


def without_held(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "held"} for row in rows]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return run(1, "plain")[0]


@pytest.mark.parametrize(
    ("num_ranks", "way", "options"),
    [
        (1, "deferred", {}),
        (2, "deferred", {}),
        (2, "function", {"measure": False}),
        (3, "deferred", {"plan": {"*": "rank:0", "blocks.*": "rank:1+rank:2"}}),
    ],
    ids=["alone", "measured", "function", "wide"],
)
def test_the_same_as_ordinary_construction(
    num_ranks: int, way: str, options: dict[str, Any], plain: dict[str, Any]
) -> None:
    rows = run(num_ranks, way, options)
    assert without_held(rows) == without_held([plain]) * num_ranks
    assert sum(row["held"] for row in rows) == plain["held"]


def test_groups(plain: dict[str, Any]) -> None:
    rows = run(2, "deferred", {"data_parallel": 2})
    assert {row["begun"] for row in rows} == {plain["begun"]} and {row["held"] for row in rows} == {plain["held"]}


def test_rank_0_counts_where_the_ranks_have_other_seeds(plain: dict[str, Any]) -> None:
    rows = run(2, "deferred", apart=1)
    assert without_held(rows) == without_held([plain]) * 2


def test_a_model_on_the_meta_device_is_told_the_way() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(farspan.FarspanError, match="'weight' has no data") as caught:
        farspan.distribute(model)
    assert "deferred_init" in str(caught.value)

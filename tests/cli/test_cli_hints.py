"""Hints for `farspan plan train.py`, on its command line and in the script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import farspan
from farspan.cli.main import main

SCRIPT = """
import torch, farspan
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
model = farspan.distribute(model{arguments})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    for _ in range(4):
        model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
"""
CLUSTER = """
[links]
within = "100 GB/s"
[[hosts]]
kind = "A100"
devices = 3
memory = "80 GiB"
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*words: str, arguments: str = "", code: int = 0) -> str:
        (tmp_path / "train.py").write_text(SCRIPT.replace("{arguments}", arguments))
        assert main(["plan", "--cluster", "cluster.toml", *words, "train.py"]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return call


def places() -> dict[str, str]:
    found = farspan.Plan.load("plan.json")
    return {name: found.stages[stage] for name, stage in found.placement.items()}


def test_hints_of_the_command_line_and_of_the_script_count(plan: Any) -> None:
    text = plan("--pin", "[01]=rank:1", "--together", "2,3", "--explain", "1.0", arguments=", pins={'3': 'rank:0'}")
    assert places() == {"0": "rank:1", "1": "rank:1", "2": "rank:0", "3": "rank:0"}
    assert "0.0, 1.0: pinned to rank:1 by '[01]'" in text and "1.0 is on rank:1, stage 0, pinned to" in text
    found = json.loads(plan("--pin", "3=rank:1", "--json", arguments=", pins={'3': 'rank:0'}, stages=2"))
    assert places()["3"] == "rank:1" and len(found["stages"]) == 2
    assert [stage["hints"] for stage in found["stages"] if stage["hints"]] == [{"3.0": "pinned to rank:1 by '3'"}]


def test_so_many_stages(plan: Any) -> None:
    plan("--stages", "3")
    assert farspan.Plan.load("plan.json").num_stages == 3
    plan("--stages", "1", arguments=", stages=3")
    assert farspan.Plan.load("plan.json").num_stages == 1


def test_memory(plan: Any) -> None:
    assert max(stage["memory_bytes"] for stage in json.loads(plan("--json"))["stages"]) > 110e3
    found = json.loads(plan("--max-memory", "110kB", "--json"))
    assert len(found["stages"]) > 1 and all(stage["memory_bytes"] <= 110e3 for stage in found["stages"])
    err = plan("--max-memory", "rank:0=1kB", "--pin", "0=rank:0", code=2)
    assert "there is a plan without '0' pinned to rank:0, or without max_memory={'rank:0': '1kB'}" in err


def test_a_part_of_a_block_can_be_pinned(plan: Any) -> None:
    plan("--pin", "2.0=rank:1", "--pin", "*=rank:0")
    assert set(places().items()) >= {("2", "rank:1"), ("0", "rank:0")}


def test_remat_of_the_script_counts(plan: Any) -> None:
    plan(arguments=", remat=['1']")
    assert farspan.Plan.load("plan.json").remat == ("1",)
    plan(arguments=", remat=True")
    assert farspan.Plan.load("plan.json").remat == ("0", "1", "2", "3")


def test_wrong_words(plan: Any) -> None:
    for words, said in (
        (["--pin", "head"], "--pin head: there is no ="),
        (["--pin", "9=rank:0"], "the hint '9' matches nothing"),
        (["--pin", "1=rank:3"], "there is no rank 3"),
        (["--max-memory", "much"], "max_memory='much' is no size"),
        (["--pin", "=rank:0"], "there is no name before the ="),
        (["--pin", "1=rank:0", "--pin", "1=rank:1"], "--pin 1 is there twice"),
        (["--pin", "1=rank:99999999999"], "is not a place"),
        (["--together", "0,,1"], "--together 0,,1: a name is empty"),
        (["--max-memory", "14GiB/s"], "is no size"),
        (["--max-memory", "1e999GiB"], "is no size"),
        (["--max-memory", "rank:0=1GiB", "--max-memory", "rank:0=2GiB"], "--max-memory rank:0 is there twice"),
        (["--stages", "0"], "'0' is not a whole number from 1"),
        (["--explain", " "], "--explain has no name"),
        (["--together", "0,7"], "the hint '7' matches nothing"),
    ):
        assert said in plan(*words, code=2), words


def test_hints_have_no_effect_on_a_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--pin", "a=rank:0"], ["--together", "a,b"], ["--max-memory", "1GiB"], ["--stages", "2"]):
        assert main(["plan", "--graph", "g.json", "--cluster", "c.toml", *words]) == 2
        assert f"{words[0]} has no effect on a graph" in capsys.readouterr().err

"""`farspan plan train.py` and `farspan profile train.py` as a user types them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence

import pytest
import torch
from benchmarks.bubble_rates.schedules import Chain, Costs, one_f_one_b
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.cli.main import main
from farspan.planner import simulate
from farspan.report import MeasuredStep, Span, Timeline

SCRIPT = """
import argparse, torch, farspan
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--json", action="store_true")
width = parser.parse_args().width
print("width", width)
model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)])
model = farspan.distribute(model, plan="plan.json")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    for _ in range(4):
        model(torch.ones(64, width)).square().mean().backward()
    optimizer.step()
    assert step < 1, "it goes on"
"""
CLUSTER = """
[links]
within = "100 GB/s"
[[hosts]]
kind = "A100"
devices = 2
memory = "80 GiB"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_an_option_behind_the_script_is_pointed_out(folder, capsys) -> None:
    (folder / "train.py").write_text("import sys\nsys.exit(f'micro_batches={sys.argv}')\n")
    with pytest.raises(SystemExit):
        main(["plan", "train.py", "--lr", "1", "--micro-batches", "2"])
    first = capsys.readouterr().err.splitlines()[0]
    assert first.endswith("come before it: farspan plan --micro-batches ... train.py")


def test_a_plan_for_machines_that_are_not_there(folder, capsys) -> None:
    assert main(["plan", "train.py", "--cluster", "cluster.toml", "--width", "4096"]) == 0
    out, err = capsys.readouterr()
    assert "width 4096" in err  # the script had the words that are its own
    assert "2 stages on 2 ranks" in out and "one device" in out and "peak memory" in out
    assert "gap" not in out and "kinds" not in out and ("could win at most" in out or "is the fastest of them" in out)
    page = (folder / "plan.html").read_text()
    assert "<svg" in page and "A prediction" in page and "http" not in page.replace("http://www.w3.org", "")
    plan = farspan.Plan.load(folder / "plan.json")
    assert plan.placement == {"0": 0, "1": 0, "2": 1, "3": 1}


def test_the_plan_is_one_that_distribute_runs(folder) -> None:
    main(["plan", "train.py", "--cluster", "cluster.toml", "--width", "4096"])

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])

    def losses_of(model: nn.Module) -> list[float]:
        losses = [model(torch.full((2, 8), float(number))).square().mean() for number in range(4)]
        for loss in losses:
            loss.backward()
        return [loss.item() for loss in losses]

    models = [build() for _ in range(2)]
    found = run_threads(2, lambda rank: losses_of(farspan.distribute(models[rank], plan=folder / "plan.json")))
    assert found == [losses_of(build())] * 2


BATCHES = """
import torch, farspan
from torch import nn
blocks = [nn.Sequential(nn.Linear(4096, 4096), nn.Tanh()) for _ in range(4)]
if MIXES: blocks.insert(2, nn.BatchNorm1d(4096))
model = farspan.distribute(nn.Sequential(*blocks), micro_batches=MICRO_BATCHES)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(4096, 4096)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("asked", [4, "auto"])
def test_micro_batches_of_the_script_count(folder, capsys, asked: int | str) -> None:
    """As in the run, each batch is cut: with one micro-batch, one device would be as fast as several."""
    (folder / "train.py").write_text(f"MIXES, MICRO_BATCHES = False, {asked!r}\n{BATCHES}")
    assert main(["plan", "--json", "--cluster", "cluster.toml", "--roofline", "train.py"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["micro_batches"] == 4 if asked == 4 else found["micro_batches"] > 1
    assert len(found["stages"]) == 2


def test_micro_batches_that_are_measured_count(folder, capsys) -> None:
    words = f"MIXES, MICRO_BATCHES = False, 4\n{BATCHES.replace('4096', '64')}"
    (folder / "train.py").write_text(words)
    assert main(["plan", "--json", "train.py"]) == 0
    assert json.loads(capsys.readouterr().out)["micro_batches"] == 4


def test_why_the_batches_of_the_script_are_not_cut_is_said(folder, capsys) -> None:
    (folder / "train.py").write_text(f"MIXES, MICRO_BATCHES = True, 4\n{BATCHES}")
    assert main(["plan", "--cluster", "cluster.toml", "--roofline", "train.py"]) == 0
    out, _ = capsys.readouterr()
    assert ", 1 micro-batch (" in out and "note: batches are not cut into micro-batches: " in out


def test_the_advice_for_one_device_does_not_contradict_itself(folder, capsys) -> None:
    (folder / "train.py").write_text(f"MIXES, MICRO_BATCHES = False, None\n{BATCHES}")
    (folder / "cluster.toml").write_text(CLUSTER.replace("100 GB/s", "0.01 GB/s"))
    assert main(["plan", "--cluster", "cluster.toml", "--roofline", "train.py"]) == 0
    out, _ = capsys.readouterr()
    assert "do not distribute: one device is fastest" in out and ", 1 micro-batch (" in out
    assert "farspan.distribute(model, micro_batches=8)" in out
    assert out.splitlines()[-1] == "to run it: python train.py" and "farspan run" not in out


def test_a_plan_for_this_machine_as_json(folder, capsys) -> None:
    words = ["--output", "mine.json", "--html", "mine.html", "--micro-batches", "16", "--json", "train.py"]
    assert main(["plan", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["micro_batches"] == 16 and found["plan"] == "mine.json" and found["step_s"] > 0
    assert 0 < found["lower_bound_s"] <= found["step_s"]
    assert (folder / "mine.json").exists() and (folder / "mine.html").exists()


def test_why_a_module_is_where_it_is(folder, capsys) -> None:
    main(["plan", "train.py", "--cluster", "cluster.toml", "--explain", "1", "--width", "4096"])
    assert "1 is on rank:0, stage 0" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_who_waits_at_a_terminal_sees_how_much_is_measured(folder, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["profile", "train.py"]) == 0
    assert "measuring" in terminal.getvalue() and "100%" in terminal.getvalue()
    assert "width 8" in terminal.getvalue()


def test_a_log_file_gets_no_bar(folder, capsys) -> None:
    assert main(["profile", "train.py"]) == 0
    assert "measuring" not in capsys.readouterr().err


def test_a_profile_that_can_be_planned(folder, capsys) -> None:
    assert main(["profile", "--output", "graph.json", "train.py"]) == 0
    assert "farspan plan --graph graph.json --micro-batches 4" in capsys.readouterr().out
    assert main(["plan", "--graph", "graph.json", "--cluster", "cluster.toml", "--json"]) == 0
    (stage, *_) = json.loads(capsys.readouterr().out)["plan"]["stages"]
    assert stage["nodes"][0] == "0"


def test_what_was_measured_once_is_not_measured_again(folder, capsys) -> None:
    def plan(*words: str) -> dict:
        assert main(["plan", "--json", "train.py", *words]) == 0
        return json.loads(capsys.readouterr().out)

    first, second = plan(), plan()
    assert first["notes"] == [] and "--fresh measures again" in second["notes"][0]
    assert second["step_s"] == first["step_s"]
    assert [stage["memory_bytes"] for stage in second["stages"]] == [stage["memory_bytes"] for stage in first["stages"]]
    assert plan("--width", "16")["notes"] == []  # another step
    assert plan("--fresh")["notes"] == []
    (path,) = [each for each in (folder / "cache").rglob("*.json") if str(each) in second["notes"][0]]
    path.write_text("{}")
    assert plan()["notes"] == []


def measured(result: dict, times: Sequence[float]) -> MeasuredStep:
    """The step of a plan of two stages, of which each takes so many times as long as predicted."""
    costs = [
        Costs(forward=stage["forward_s"] * factor, backward=stage["backward_s"] * factor)
        for stage, factor in zip(result["stages"], times, strict=True)
    ]
    schedule = one_f_one_b(Chain(ranks=(0, 1), costs=tuple(costs), num_micro_batches=result["micro_batches"]))
    simulated = simulate(schedule)
    spans = [
        Span(
            rank=task.rank,
            kind="F" if task.kind.value == "F" else "B",
            name="",
            micro_batch=task.micro_batch,
            start_ns=round(simulated.starts[index] * 1e9),
            end_ns=round(simulated.ends[index] * 1e9),
        )
        for index, task in enumerate(schedule.tasks)
    ]
    return MeasuredStep(timeline=Timeline(spans=tuple(spans), num_ranks=2), schedule=schedule)


def test_a_measured_step_changes_the_plan_where_that_pays(folder, capsys) -> None:
    words = ["plan", "--json", "train.py", "--cluster", "cluster.toml", "--width", "4096"]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    before = (folder / "plan.json").read_text()
    again = ["plan", "train.py", "--cluster", "cluster.toml", "--recalibrate", "step.json", "--width", "4096"]

    (folder / "step.json").write_text(measured(result, (2.0, 2.0)).to_json())
    assert main(again) == 0
    out = capsys.readouterr().out
    assert "rank:0 +100 %, rank:1 +100 %" in out and "the plan stays" in out
    assert (folder / "plan.json").read_text() == before

    (folder / "step.json").write_text(measured(result, (1.0, 3.0)).to_json())
    assert main(again) == 0
    out = capsys.readouterr().out
    assert "rank:0 +0 %, rank:1 +200 %" in out and "less" in out
    assert farspan.Plan.load(folder / "plan.json").placement == {"0": 0, "1": 0, "2": 0, "3": 1}

    assert main(again) == 2  # the step did not run under this plan
    assert "is not the plan for these costs" in capsys.readouterr().err
    (folder / "step.json").write_text("{}")
    assert main(again) == 2
    assert "step.json is not a step of farspan" in capsys.readouterr().err


def test_wrong_words(folder, capsys) -> None:
    (folder / "empty.py").write_text("")
    (folder / "broken.py").write_bytes(b"\x00{")
    for words, said in (
        (["plan"], "there is nothing to plan"),
        (["plan", "missing.py"], "there is no script missing.py"),
        (["plan", "emtpy.py"], ", which has empty.py."),
        (["plan", "--pin", "head", "rank:1", "empty.py"], "--pin head: there is no =."),
        (["plan", "-m"], "no script to run"),
        (["plan", "-m", "no_such_module"], "there is no module no_such_module"),
        (["plan", "-m", "json.nothing"], "json.nothing cannot be run"),
        (["profile", "cluster.toml"], "cluster.toml is no program of Python"),
        (["plan", "broken.py"], "broken.py is no program of Python"),
        (["plan", "--output", "empty.py", "empty.py"], "--output empty.py cannot be written"),
        (["plan", "--html", "no/such.html", "empty.py"], "--html no/such.html cannot be written"),
        (["plan", "--html", "x", "--output", "x", "empty.py"], "--html x cannot be written"),
        (["profile", "--output", "", "empty.py"], "cannot be written"),
        (["plan", "--recalibrate", "cluster.toml", "empty.py"], "plan.json cannot be read"),
        (["plan", "--graph", "g.json", "train.py"], "a script and a graph are both given"),
        (["plan", "--graph", "g.json"], "which devices?"),
        (["plan", "--graph", "g.json", "--cluster", "cluster.toml", "--roofline"], "--roofline has no effect"),
        (["plan", "empty.py"], "has not called farspan.distribute"),
        (["profile"], "no script to run"),
        (["profile", "--output", "empty.py", "empty.py"], "--output empty.py cannot be written"),
        (["profile", "--output", "data.json", "empty.py", "data.json"], "has not called farspan.distribute"),
    ):
        argv, path = list(sys.argv), list(sys.path)
        assert main(words) == 2, words
        assert said in capsys.readouterr().err
        assert (sys.argv, sys.path) == (argv, path)


def test_the_error_of_a_script_is_its_own(folder) -> None:
    (folder / "train.py").write_text("raise KeyError('mine')")
    with pytest.raises(KeyError, match="mine"):
        main(["plan", "train.py"])
    (folder / "train.py").write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit):
        main(["plan", "train.py"])

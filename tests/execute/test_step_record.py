"""What is known of a step that has run."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, on_ranks, steps
from tests.support.places import engine
from torch import nn

import farspan
from farspan.execute.process.console import Console
from farspan.execute.step.executor import Executor


def test_what_the_loop_computes_beside_its_micro_batches_is_none() -> None:
    def program(model: nn.Module) -> tuple[int, set[int]]:
        farspan.distribute(model)
        losses = []
        for number in range(3):
            loss = F.cross_entropy(model(X + number), Y)
            loss.backward()
            losses.append(loss.detach() * 2)
        farspan.flush()
        step = farspan.last_step()
        assert step is not None
        return step.num_micro_batches, {trace.micro_batch for trace in step.traces if trace.kind != "wait"}

    found = on_ranks(2, program)
    assert [num for num, _ in found] == [3, 3]
    assert found[0][1] == {0, 1, 2}
    assert found[1][1] == {-1, 0, 1, 2}  # where the losses are


def test_a_task_is_named_by_what_runs_in_it() -> None:
    """Stages and micro-batches are numbered by the plan and the step, and not by names of tasks as well."""

    def program(model: nn.Module) -> list[tuple[str, str]]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        steps(farspan.distribute(model, measure=False), optimizer, 2)
        step = farspan.last_step()
        assert step is not None
        return sorted({(trace.kind, trace.name) for trace in step.traces if trace.micro_batch == 0})

    first, _ = on_ranks(2, program)
    names = {name for _, name in first}
    assert len(names) == 1 and not re.search(r"segment|stage|micro-batch", str(names))
    assert {kind for kind, _ in first} >= {"F", "B"}


def test_the_third_step_is_compared_with_the_plan(caplog, monkeypatch) -> None:
    plan = farspan.Plan(
        stages=("rank:0", "rank:1"),
        placement={"layers.0": 0, "*": 1},
        estimates={"micro_batch_s": [1e-9, 1e9]},
    )
    caplog.set_level(logging.INFO, logger="farspan.execute.process.console")
    monkeypatch.setattr(logging.getLogger("farspan"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("farspan"), "propagate", False)

    def program(model: nn.Module) -> None:
        steps(farspan.distribute(model, plan=plan), torch.optim.SGD(model.parameters(), 0.1), 4)

    shown: list[str] = []
    monkeypatch.setattr(Console, "_say", lambda self, text, *, is_shown: shown.append(text))
    on_ranks(2, program)
    (line,) = [record.getMessage() for record in caplog.records if "differs from the plan" in record.getMessage()]
    assert shown and not any("differs from the plan" in text for text in shown)  # but with --verbose
    (more, less) = re.findall(r"rank \d .*? \(([-+]\d+) %\)", line)
    assert int(more) > 100_000 and int(less) == -100
    assert "farspan plan --recalibrate" in line


def test_a_report_that_cannot_be_kept_is_one_warning(caplog, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FARSPAN_REPORT", str(tmp_path / "file" / "step.html"))
    monkeypatch.setattr(logging.getLogger("farspan"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("farspan"), "propagate", False)

    def program(model: nn.Module) -> None:
        steps(farspan.distribute(model), torch.optim.SGD(model.parameters(), 0.1), 11)

    on_ranks(2, program)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"the report is not kept: {tmp_path / 'file' / 'step.html'}: File exists"
    ]


def test_a_task_that_waits_for_parameters_of_other_groups_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, wait_s = Executor._forward, 0.05

    def after_gathering(executor: Executor, segment: Any) -> None:
        time.sleep(wait_s)
        executor.waited_ns += round(1e9 * wait_s)
        forward(executor, segment)

    def program(model: nn.Module) -> tuple[float, float, float]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        steps(farspan.distribute(model, measure=False), optimizer, 3)
        monkeypatch.setattr(Executor, "_forward", after_gathering)
        steps(model, optimizer, 1)
        step = farspan.last_step()
        assert step is not None and step.exchange is not None
        tasks_s = sum([trace.end_ns - trace.start_ns for trace in step.traces]) / 1e9
        return step.wait_s, tasks_s - step.compute_s, tasks_s - step.exchange.busy_s()[0]

    (waited_s, *others), *_ = on_ranks(1, program)
    assert waited_s >= wait_s and others == pytest.approx([waited_s] * 2)


class Drop(nn.Module):
    """Stochastic depth: decides by what it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand(()) < 0.1 else x + self.inner(x)


@pytest.mark.parametrize(("seed", "reads"), [(None, False), (0, False), (0, True)])
def test_a_training_step_ends_where_an_optimizer_steps(seed: int | None, reads: bool) -> None:
    """Whatever runs a micro-batch before: the summary names what draws, its line and the cure, where that does."""

    def program(_: nn.Module) -> tuple[int, bool, str]:
        built = nn.Sequential(nn.Linear(4, 3), Drop(), nn.Linear(3, 2))
        model = farspan.distribute(built, seed=seed, measure=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _number in range(5):
            for _micro_batch in range(3):
                loss = model(torch.ones(2, 4)).sum()
                loss.backward()
                if reads:
                    loss.item()  # too early
            optimizer.step()
        console = engine().console
        return console.num_training_steps, console.num_backward_runs >= 10, console._overlap_hint()

    for number, runs_earlier, hint in on_ranks(2, program):
        assert (number, runs_earlier) == (5, reads or seed is None)
        assert ("1 (Drop, " in hint and f"{__file__}:" in hint and "seed=0" in hint) == (seed is None)
        assert (f"(loss.item()  # too early, at {__file__}:" in hint and ", in program), so one ends" in hint) == reads
        assert bool(hint) == (reads or seed is None)


READ_ONCE = {
    "of one micro-batch": (1, "after the backward"),
    "after the step": (3, "after the step"),
    "before the step": (3, "before the step"),
    "in a closure": (1, "in a closure"),
}


@pytest.mark.parametrize("name", READ_ONCE)
def test_a_value_that_is_read_where_no_micro_batch_follows_costs_nothing(name: str) -> None:
    number, where = READ_ONCE[name]

    def program(model: nn.Module) -> str:
        farspan.distribute(model, measure=False)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        if where == "in a closure":
            optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> torch.Tensor:
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            loss.item()
            return loss

        for _ in range(5):
            losses: list[torch.Tensor] = []
            for _ in range(number if where != "in a closure" else 0):
                losses.append(F.cross_entropy(model(X), Y))
                losses[-1].backward()
                if where == "after the backward":
                    losses[-1].item()
            if where == "before the step":
                sum(losses).item()  # type: ignore[union-attr]
            optimizer.step(*[closure] * (where == "in a closure"))
            if where == "after the step":
                [loss.item() for loss in losses]
        return engine().console._overlap_hint()

    assert on_ranks(2, program) == ["", ""]


def test_a_program_without_an_optimizer_has_a_training_step_for_each_backward_that_runs() -> None:
    def program(model: nn.Module) -> int:
        farspan.distribute(model, measure=False)
        for _ in range(4):
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            loss.item()
        return engine().console.num_training_steps

    assert on_ranks(2, program) == [4, 4]

"""At the end of a run rank 0 says what its steps took, what one rank would take, and what to try."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.warm.commands import farspan_run

from farspan.execute.process import console as console_module
from farspan.execute.process.console import Console
from farspan.execute.process.summary import Ranks, StepTime, describe_run

TRAIN = """
import sys
import torch
import farspan

model = farspan.distribute(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]), measure=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""


def times(*busy_s: float, run_s: float, number: int = 1) -> list[StepTime]:
    return [StepTime(run_s + 0.1, run_s, busy_s, number)] * 3


def test_the_work_of_all_ranks_is_what_one_would_take() -> None:
    first, second = describe_run(60, times(0.9, 0.8, run_s=1.0, number=8), Ranks(num_threads=2))
    assert first == "60 training steps, 1.10 s each (median of the last 3)"
    assert second == (
        "forward and backward take 1.00 s of it; one rank of 2 threads would take about 1.70 s for the same 8 "
        "micro-batches, the computing of 2 ranks added up: 1.7 times as fast on 2 ranks"
    )


def test_the_groups_all_do_the_same_work() -> None:
    lines = describe_run(60, times(0.9, 0.8, run_s=1.0), Ranks(num_groups=2))
    assert (
        "averaging gradients" in lines[1] and "about 3.40 s" in lines[1] and "3.4 times as fast on 4 ranks" in lines[1]
    )


@pytest.mark.parametrize(
    ("run_s", "said"),
    [(1.0, "no faster on 2 ranks"), (2.0, "2.0 times as slow on 2 ranks"), (0.9, "1.1 times as fast")],
)
def test_ranks_that_win_little_are_said_to_and_what_to_try(run_s: float, said: str) -> None:
    _, compared, tried = describe_run(60, times(0.5, 0.5, run_s=run_s, number=4), Ranks())
    assert said in compared
    assert ("fewer ranks" in tried) == (run_s >= 1.0)
    assert "a step has 4 micro-batches" in tried and f"for {100 - 50 / run_s:.0f} % of that" in tried


@pytest.mark.parametrize(("busy_s", "may_cut"), [((0.5, 0.5), False), ((1.0,), True)])
def test_more_micro_batches_are_not_tried_in_vain(busy_s: tuple[float, ...], may_cut: bool) -> None:
    """Not where batches are known to stay whole, nor where each model is on one rank, which waits for no other."""
    *_, tried = describe_run(60, times(*busy_s, run_s=2.0), Ranks(num_groups=2, may_cut=may_cut))
    assert "try larger batches" in tried and "micro-batch" not in tried


def test_micro_batches_are_what_to_try_where_there_are_none() -> None:
    *_, last = lines = describe_run(60, times(0.5, 0.5, run_s=2.0), Ranks(), "micro_batches=8 is faster")
    assert last == "micro_batches=8 is faster" and len(lines) == 3


@pytest.mark.parametrize("hint", ["", "micro_batches=8 is faster"])
@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (Ranks(is_timed=False), []),
        (Ranks(num_near=4, num_threads=2, num_cores=4), ["4 ranks of 2 threads share 4 cores"]),
    ],
)
def test_what_one_rank_would_take_is_not_said_where_nobody_knows(ranks: Ranks, said: list[str], hint: str) -> None:
    _, *more = describe_run(60, times(0.5, 0.5, run_s=2.0), ranks, hint)
    assert len(more) == len(said) + bool(hint)
    assert not any("one rank" in line for line in more)
    assert all(words in line for words, line in zip([*said, hint], more, strict=False))


def test_too_few_steps_are_no_summary() -> None:
    assert describe_run(4, times(0.5, 0.5, run_s=2.0)[:2], Ranks()) == []


class Program:
    """Steps of a program as rank 0 sees them, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, rank: int = 0, world_size: int = 2) -> None:
        self.now_ns = 0
        clock = SimpleNamespace(perf_counter_ns=lambda: self.now_ns)
        monkeypatch.setattr(console_module, "time", clock)
        side: Any = SimpleNamespace(rank=rank, world_size=world_size)
        self.console = Console(side, 1.0)

    def run(self, run_s: float, *busy_s: float, has_backward: bool = True, besides_s: float = 0.1) -> None:
        began_ns = self.now_ns + round(besides_s * 1e9)
        self.now_ns = began_ns + round(run_s * 1e9)
        exchange = SimpleNamespace(busy_s=lambda: list(busy_s))
        record: Any = SimpleNamespace(
            has_backward=has_backward, num_micro_batches=4, began_ns=began_ns, exchange=exchange, number=1
        )
        self.console.step_ended(record)

    def summary(self, capsys: pytest.CaptureFixture[str], num_groups: int = 1) -> list[str]:
        self.console.summarize(num_groups, {"cpu"})
        return capsys.readouterr().err.splitlines()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.setattr(console_module, "num_cores", lambda: 1000)
    return Program(monkeypatch)


def test_the_first_steps_and_those_of_an_earlier_plan_do_not_count(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(4):
        program.run(50.0, 1.0, 1.0)
    program.console.show_plan("a plan")  # pyright: ignore[reportArgumentType]
    for run_s in (20.0, 10.0, 1.0, 1.0, 1.0):
        program.run(run_s, 0.9, 0.9)
    first, second = program.summary(capsys)
    assert first == "farspan: 9 training steps, 1.10 s each (median of the last 3)"
    assert second.startswith("farspan: forward and backward take 1.00 s of it") and "1.8 times" in second


def test_what_is_read_before_the_backward_and_averaging_are_parts_of_a_step(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(6):
        program.run(0.5, 0.25, 0.25, has_backward=False)
        program.run(1.0, 0.75, 0.5)
        program.console.add_averaging(500_000_000)
        program.now_ns += 500_000_000
    first, second, _ = program.summary(capsys)
    assert first == "farspan: 6 training steps, 2.20 s each (median of the last 4)"
    assert "take 2.00 s of it" in second and "about 1.75 s" in second


def test_a_long_run_keeps_the_last_times_alone(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(1000):
        program.run(5.0 if number < 500 else 1.0, 0.9, 0.9)
    assert program.summary(capsys)[0] == "farspan: 1000 training steps, 1.10 s each (median of the last 200)"


def test_times_of_more_ranks_than_are_left_do_not_count(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(6):
        program.run(1.0, 0.9, 0.9, 0.9)
    for _ in range(4):
        program.run(1.0, 0.9, 0.9)
    assert "the computing of 2 ranks" in program.summary(capsys)[1]


@pytest.mark.parametrize(("rank", "world_size", "is_mute"), [(1, 2, False), (0, 1, False), (0, 2, True)])
def test_one_rank_of_several_speaks(
    rank: int, world_size: int, is_mute: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Program(monkeypatch, rank=rank, world_size=world_size)
    program.console.is_mute = is_mute
    for _ in range(8):
        program.run(1.0, *[0.9] * world_size)
    assert program.summary(capsys) == []


@pytest.mark.parametrize("is_launched", [True, False])
def test_what_to_try_is_said_once(is_launched: bool, program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    """After the third step, if `farspan run` has launched the ranks, else at the end."""
    program.console.is_launched = is_launched
    for _ in range(8):
        program.console.note_drawing("a module")
        program.run(1.0, 0.9, 0.9)
        program.console.optimizer_stepped()
    (early,) = capsys.readouterr().err.splitlines() or [""]
    assert ("a module decides by what it draws" in early) == is_launched
    assert any("a module decides by what it draws" in line for line in program.summary(capsys)) != is_launched


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "sys.exit(3)", "raise ValueError"])
def test_a_run_that_ends_well_ends_with_its_summary(end: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + end)
    run = farspan_run(["-n", "2", "train.py"], folder=tmp_path)
    is_well = end in ("", "sys.exit(0)")
    assert run.returncode == (0 if is_well else 3 if "3" in end else 1), run.stderr
    assert len(re.findall("^farspan: 6 training steps, .* each", run.stderr, re.MULTILINE)) == is_well, run.stderr
    if is_well:
        lines = run.stderr.splitlines()
        assert lines and all(line.startswith(("farspan: ", "  ")) for line in lines)
        assert sum("stages on 2 ranks" in line for line in lines) == 1

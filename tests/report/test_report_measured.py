"""Where the time of a step went, beside what its schedule allows."""

from __future__ import annotations

import dataclasses
import json

import pytest

from farspan.report import MeasuredStep, Span, Timeline
from farspan.schedule import one_f_one_b, straight

MS = 1_000_000
SCHEDULE = one_f_one_b(straight(2, 2))
#            0    10   20   30   40   50   60   70   80   90   100  110  120
# rank 0     F0   F1   .......   ......    B0        (5) B1
# rank 1     .....F0   B0        (link) ..F1   B1
ROWS = [
    (0, "F", 0, 0, 10),
    (0, "F", 1, 10, 20),
    (0, "wait", 0, 20, 45),
    (0, "B", 0, 45, 65),
    (0, "wait", 1, 65, 95),
    (0, "B", 1, 100, 120),
    (1, "wait", 0, 0, 12),
    (1, "F", 0, 12, 22),
    (1, "B", 0, 22, 42),
    (1, "F", 1, 42, 52),
    (1, "B", 1, 60, 80),
]


def step(rows: list[tuple[int, str, int, int, int]]) -> MeasuredStep:
    spans = [
        Span(rank=rank, kind=kind, name="a", micro_batch=number, start_ns=start * MS, end_ns=end * MS)  # type: ignore[arg-type]
        for rank, kind, number, start, end in rows
    ]
    return MeasuredStep(
        timeline=Timeline(spans=tuple(spans), num_ranks=2), schedule=SCHEDULE, plan="stage 0", environment=("here",)
    )


def test_five_shares_of_the_time() -> None:
    measured = step(ROWS)
    first, second = measured.shares(0), measured.shares(1)
    # by the schedule: F0 F1 .. .. B0 F.. of rank 0 end at 100 ms: 20 + 20 + 20 for it, and 30 + 30 on rank 1
    assert measured.simulation.step_time == pytest.approx(0.090)
    assert dataclasses.astuple(first) == pytest.approx((0.060, 0.030, 0.007, 0.018, 0.005))
    assert dataclasses.astuple(second) == pytest.approx((0.060, 0.030, 0.020, 0.002, 0.008))
    for shares in (first, second):
        assert sum(dataclasses.astuple(shares)) == pytest.approx(measured.timeline.duration_s)


def test_a_step_as_planned_has_its_bubble_alone() -> None:
    planned = step(ROWS).planned()
    measured = MeasuredStep(timeline=planned, schedule=SCHEDULE)
    for rank in range(2):
        assert dataclasses.astuple(measured.shares(rank)) == pytest.approx((0.060, 0.030, 0, 0, 0))


def test_the_table_names_them() -> None:
    lines = step(ROWS).table().splitlines()
    assert lines[0] == "step 120 ms, 90.0 ms by the schedule alone"
    assert lines[2].split() == ["computing", "50.0", "%", "50.0", "%", "50.0", "%"]
    assert lines[-1].startswith("host, between tasks") and len(lines) == 7


def test_a_step_goes_through_its_file() -> None:
    measured = step(ROWS)
    again = MeasuredStep.from_json(measured.to_json())
    assert again.table() == measured.table() and (again.plan, again.environment) == ("stage 0", ("here",))
    assert again.planned() == measured.planned()


@pytest.mark.parametrize("text", ["[]", '{"farspan_step": 9}', json.dumps({"farspan_step": 1})])
def test_another_file_is_not_a_step(text: str) -> None:
    with pytest.raises(ValueError, match="step of farspan"):
        MeasuredStep.from_json(text)

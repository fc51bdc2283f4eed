"""Where the time of a step went, beside what its schedule allows."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from benchmarks.bubble_rates.schedules import one_f_one_b, straight
from hypothesis import given, settings
from tests.documents.edits import edited, try_to_read

from farspan.errors import PlanError
from farspan.report import MeasuredStep, Span, Timeline, page_of

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


def changed(*keys: str | int, to: Any = ...) -> str:
    """The text of a step with another value at these keys, or without it."""
    value = json.loads(step(ROWS).to_json())
    inner = value
    for key in keys[:-1]:
        inner = inner[key]
    if to is ...:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = to
    return json.dumps(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "step.json is []"),
        ("{}", "step.json is not a step of farspan"),
        (changed("farspan_step", to=2), "not a step of farspan"),
        (changed("farspan_step", to=True), "not a step of farspan"),
        (changed("more", to=1), 'unknown key "more"'),
        (changed("plan"), 'the key "plan" is missing'),
        (changed("plan", to=None), "plan is None"),
        (changed("environment", to=["a", 1]), "environment is 1"),
        (changed("timeline", "title"), '"title" is missing'),
        (changed("timeline", "num_ranks", to=10**9), "num_ranks is 1000000000"),
        (changed("timeline", "num_ranks", to=True), "num_ranks is True"),
        (changed("timeline", "num_ranks", to=3), "orders is"),
        (changed("timeline", "spans", 0, to=[0, "F", "a", 0, 1]), "spans[0] is"),
        (changed("timeline", "spans", 0, 0, to=2), "spans[0]: rank is 2"),
        (changed("timeline", "spans", 0, 0, to=-1), "spans[0]: rank is -1"),
        (changed("timeline", "spans", 0, 1, to="X"), "spans[0]: kind is 'X'"),
        (changed("timeline", "spans", 0, 1, to=["F"]), "spans[0]: kind is ['F']"),
        (changed("timeline", "spans", 0, 2, to=None), "spans[0]: name is None"),
        (changed("timeline", "spans", 0, 3, to=-2), "spans[0]: micro_batch is -2"),
        (changed("timeline", "spans", 0, 4, to=1.5), "spans[0]: start_ns is 1.5"),
        (changed("timeline", "spans", 0, 5, to=-1), "spans[0]: end_ns is -1"),
        (changed("timeline", "spans", 0, 5, to=10**30), "spans[0]: end_ns is 1000"),
        (changed("timeline", "spans", 0, 1, to="wait"), "rank 0 ran other tasks"),
        (changed("tasks", 0, 0, to="wait"), "tasks[0]: kind is 'wait'"),
        (changed("tasks", 0, 1, to=2), "tasks[0]: rank is 2"),
        (changed("tasks", 0, 3, to=-1), "tasks[0]: level is -1"),
        (changed("tasks", 0, 4, to=[0]), "tasks[0]: needs is 0"),
        (changed("tasks", 1, 4, to=[0, 0]), "tasks[1]: needs is [0, 0]"),
        (changed("tasks", 0, 5, to=1), "tasks[0]: holds is 1"),
        (changed("tasks", to={}), "tasks is {}"),
        (changed("orders", 0, 0), "nobody runs"),
        (changed("orders", 0, 0, to=99), "orders[0] is 99"),
        (changed("orders", 0, to=[True]), "orders[0] is True"),
        (changed("orders", to=[list(reversed(order)) for order in SCHEDULE.orders]), "cannot end"),
    ],
)
def test_a_mistake_in_a_file_is_named(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        MeasuredStep.from_json(text, "step.json")
    assert message in caught.value.what and caught.value.why and caught.value.hint
    assert caught.value.what.startswith("step.json")


@given(edited(step(ROWS).to_json()))
@settings(derandomize=True, max_examples=200)
def test_no_edit_of_a_file_is_more_than_an_error(text: str) -> None:
    read = try_to_read(MeasuredStep.from_json, text)
    if read is not None:
        assert read.table() and read.planned() and "<svg" in page_of(read, title="a step")

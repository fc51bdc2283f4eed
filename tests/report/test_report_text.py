"""Console lines and traces."""

from __future__ import annotations

import itertools
import json

from farspan.report import Span, Timeline, lanes, perfetto, summary

MS = 1_000_000
STEP = Timeline(
    spans=(
        Span(rank=0, kind="F", name="a", micro_batch=0, start_ns=100 * MS, end_ns=110 * MS),
        Span(rank=0, kind="wait", name="gradient of a", micro_batch=0, start_ns=110 * MS, end_ns=140 * MS),
        Span(rank=0, kind="recv", name="gradient of a", micro_batch=0, start_ns=130 * MS, end_ns=140 * MS),
        Span(rank=0, kind="B", name="a", micro_batch=0, start_ns=140 * MS, end_ns=160 * MS),
        Span(rank=1, kind="F", name="b", micro_batch=0, start_ns=110 * MS, end_ns=120 * MS),
        Span(rank=1, kind="B", name="b", micro_batch=0, start_ns=120 * MS, end_ns=140 * MS),
    ),
    num_ranks=2,
    title="step",
)


def test_summary_is_one_line() -> None:
    assert summary(STEP) == "60.0 ms | bubble 50.0 % | busy 50 % 50 %"


def test_summary_of_many_ranks_is_a_range() -> None:
    assert summary(Timeline(spans=STEP.spans, num_ranks=64)).endswith("| busy 0 to 50 % on 64 ranks")


def test_summary_and_lanes_of_nothing() -> None:
    nothing = Timeline(spans=(), num_ranks=2)
    assert summary(nothing) == lanes(nothing) == "no tasks"


def test_lanes_draw_tasks_waits_and_idle() -> None:
    assert lanes(STEP, width=8 + 30 + 7).splitlines() == [
        "rank 0  F0---...............B0========   50 %",
        "rank 1       F0---B0========             50 %",
        "        0                      60.0 ms",
    ]


def test_lanes_keep_to_their_width_in_ascii() -> None:
    for width in (40, 80, 133):
        text = lanes(STEP, width=width)
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= width


def test_perfetto_has_every_span_on_a_track_where_nothing_overlaps() -> None:
    events = json.loads(perfetto(STEP))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(STEP.spans)
    assert complete[0] == {
        "name": "F0 a",
        "cat": "F",
        "ph": "X",
        "ts": 0.0,
        "dur": 10_000.0,
        "pid": 0,
        "tid": 0,
        "args": {"micro_batch": 0},
    }
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in complete} == named
    for track in named:
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if (e["pid"], e["tid"]) == track)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(times))


def test_perfetto_of_nothing_is_a_trace() -> None:
    assert json.loads(perfetto(Timeline(spans=(), num_ranks=0)))["traceEvents"] == []

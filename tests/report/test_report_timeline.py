"""Numbers on hand-made timelines, small enough to check in the head."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from farspan.errors import PlanError
from farspan.report import Kind, Span, Timeline

MS = 1_000_000


def span(rank: int, kind: Kind, start_ms: float, end_ms: float, micro_batch: int = 0, name: str = "blocks") -> Span:
    return Span(
        rank=rank,
        kind=kind,
        name=name,
        micro_batch=micro_batch,
        start_ns=round(start_ms * MS),
        end_ns=round(end_ms * MS),
    )


#          0    10    20    30    40 ms
# rank 0   F0---.................B0---   10 + 10 of 40 busy
# rank 1   ......F0----B0--------        20 + ...
TWO_RANKS = Timeline(
    spans=(
        span(0, "F", 0, 10),
        span(0, "wait", 10, 30),
        span(0, "B", 30, 40),
        span(1, "wait", -100, 10),
        span(1, "F", 10, 15),
        span(1, "B", 15, 30),
    ),
    num_ranks=2,
    title="two ranks",
)


def test_numbers_of_two_ranks() -> None:
    assert TWO_RANKS.duration_s == pytest.approx(0.040)
    assert [TWO_RANKS.busy_s(rank) for rank in (0, 1)] == pytest.approx([0.020, 0.020])
    assert [TWO_RANKS.busy_share(rank) for rank in (0, 1)] == pytest.approx([0.5, 0.5])
    assert TWO_RANKS.bubble == pytest.approx(0.5)
    assert TWO_RANKS.num_micro_batches == 1


def test_waits_before_the_first_task_do_not_count() -> None:
    assert [TWO_RANKS.wait_s(rank) for rank in (0, 1)] == pytest.approx([0.020, 0.010])


def test_a_rank_without_spans_counts_in_the_bubble() -> None:
    timeline = Timeline(spans=(span(0, "F", 0, 10),), num_ranks=4)
    assert timeline.bubble == pytest.approx(0.75)
    assert timeline.busy_share(3) == 0.0


def test_overlapping_spans_count_once() -> None:
    timeline = Timeline(spans=(span(0, "F", 0, 10), span(0, "B", 5, 20), span(0, "F", 6, 8)), num_ranks=1)
    assert timeline.busy_s(0) == pytest.approx(0.020)
    assert timeline.bubble == pytest.approx(0.0)


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_empty_timelines_have_numbers(num_ranks: int) -> None:
    timeline = Timeline(spans=(), num_ranks=num_ranks)
    assert (timeline.duration_s, timeline.bubble, timeline.num_micro_batches) == (0.0, 0.0, 0)
    assert [timeline.busy_share(rank) + timeline.wait_s(rank) for rank in range(num_ranks)] == [0.0] * num_ranks


def test_tasks_of_no_length_have_numbers() -> None:
    timeline = Timeline(spans=(span(0, "F", 5, 5),), num_ranks=1)
    assert (timeline.duration_s, timeline.bubble, timeline.busy_share(0)) == (0.0, 0.0, 0.0)


def test_json_round_trip() -> None:
    assert Timeline.from_json(TWO_RANKS.to_json()) == TWO_RANKS
    assert Timeline.from_json(TWO_RANKS.to_json().encode()) == TWO_RANKS
    assert pickle.loads(pickle.dumps(TWO_RANKS)) == TWO_RANKS


@pytest.mark.parametrize("text", ["", "[]", "{}", b"\xff", '{"title": "", "num_ranks": 1e9, "spans": []}', "[" * 9999])
def test_another_text_is_no_timeline(text: str | bytes) -> None:
    with pytest.raises(PlanError, match="this timeline"):
        Timeline.from_json(text)


def test_merge_is_the_whole_step() -> None:
    parts = [Timeline(spans=TWO_RANKS.of_rank(rank), num_ranks=2, title="two ranks" * rank) for rank in (0, 1)]
    merged = Timeline.merge(parts)
    assert set(merged.spans) == set(TWO_RANKS.spans)
    assert (merged.num_ranks, merged.title) == (2, "two ranks")
    assert merged == Timeline.merge(reversed(parts))
    assert merged.bubble == TWO_RANKS.bubble
    assert Timeline.merge([]) == Timeline(spans=(), num_ranks=0)


def test_impossible_spans_are_errors() -> None:
    with pytest.raises(ValueError, match="must be one of F, B"):
        Span(rank=0, kind="forward", name="x", start_ns=0, end_ns=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ends 5 ns before it starts"):
        Span(rank=0, kind="F", name="x", start_ns=5, end_ns=0)
    with pytest.raises(ValueError, match="rank is -1"):
        Span(rank=-1, kind="F", name="x", start_ns=0, end_ns=1)
    with pytest.raises(ValueError, match="of rank 2, but num_ranks=2"):
        Timeline(spans=(span(2, "F", 0, 1),), num_ranks=2)


def test_report_imports_no_torch() -> None:
    code = "import sys, farspan.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

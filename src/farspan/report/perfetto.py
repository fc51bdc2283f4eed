"""A timeline as a trace for https://ui.perfetto.dev and chrome://tracing.

One process per rank. Tracks within a rank: spans of one track must not overlap without nesting (the
viewers drop or misdraw those that do), and waits and messages do overlap tasks, so each has its own.
"""

from __future__ import annotations

import json
from typing import Any

from farspan.report.timeline import Kind, Timeline

__all__ = ["perfetto"]

_TRACKS = ("tasks", "waits", "sends", "receives")
_TRACK_OF: dict[Kind, int] = {"F": 0, "B": 0, "W": 0, "wait": 1, "send": 2, "recv": 3}


def perfetto(timeline: Timeline) -> str:
    """Returns the timeline in the Trace Event Format (JSON text; times in microseconds from the first span).

    Source: "Trace Event Format", Google, the JSON object format with complete ("X") events.
    """
    origin_ns = min((span.start_ns for span in timeline.spans), default=0)
    events: list[dict[str, Any]] = []
    for rank in range(timeline.num_ranks):
        events.append(_metadata("process_name", rank, 0, name=timeline.name_of(rank)))
        events.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
        used = {_TRACK_OF[span.kind] for span in timeline.of_rank(rank)}
        for track in sorted(used):
            events.append(_metadata("thread_name", rank, track, name=_TRACKS[track]))
            events.append(_metadata("thread_sort_index", rank, track, sort_index=track))
    for span in timeline.spans:
        label = f"{span.kind}{span.micro_batch}" if span.micro_batch >= 0 else span.kind
        events.append(
            {
                "name": f"{label} {span.name}".rstrip(),
                "cat": span.kind,
                "ph": "X",
                "ts": (span.start_ns - origin_ns) / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "pid": span.rank,
                "tid": _TRACK_OF[span.kind],
                "args": {"micro_batch": span.micro_batch},
            }
        )
    value = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": timeline.title}}
    return json.dumps(value, separators=(",", ":"))


def _metadata(what: str, rank: int, track: int, **args: object) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": track, "args": args}

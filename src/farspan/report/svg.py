"""A timeline as one hand-written SVG: a lane per rank, a cell per task, no script, no external resource.

    title                                                     heading
    312 ms | bubble 9.1 % | 8 micro-batches
                                                      busy
    rank 0  [0][1][2][3]//[ 0  ][ 1  ]//[ 2  ]        91 %    lanes: tasks on a track, waits hatched
    rank 1  ///[0][ 0  ][1][ 1  ]                     90 %
            |        |        |        |                      axis
        ms  0       100      200      300
            # forward  # backward  # weights  / waiting       legend: only the kinds there are

Colours are Okabe and Ito's ("Color Universal Design", 2008), which all common kinds of colour vision
tell apart. The picture brings its own background, for a page's theme and the reader's can differ.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

from farspan.report.markup import escape
from farspan.report.text_report import format_share
from farspan.report.timeline import TASKS, Kind, Span, Timeline
from farspan.units import count_of, format_seconds

__all__ = ["svg"]

_MARGIN = 20
_LABEL_WIDTH = 62
_SHARE_WIDTH = 52
_CHAR_WIDTH = 7.0  # of a 12 px sans-serif digit, with room to breathe
_TICK_DISTANCE = 80

# Painted in this order: a task is never hidden behind what merely surrounds it.
_WORDS: dict[Kind, str] = {
    "wait": "waiting for a message",
    "F": "forward",
    "B": "backward",
    "W": "weight gradients",
    "send": "sending",
    "recv": "receiving",
}
_LEGEND: tuple[Kind, ...] = (*TASKS, "wait", "send", "recv")

# Every rule names the root class: inside an HTML page these rules are global.
_STYLE = """
.farspan{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.farspan text{fill:#1f2328;font-variant-numeric:tabular-nums}
.farspan .title{font-size:15px;font-weight:600}
.farspan .muted{fill:#59636e}
.farspan .in{font-size:11px;font-weight:600;text-anchor:middle;pointer-events:none}
.farspan .end{text-anchor:end}
.farspan .mid{text-anchor:middle}
.farspan .card{fill:#ffffff;stroke:#d8dee4}
.farspan .track{fill:#eff2f5}
.farspan .tick{stroke:#59636e;stroke-opacity:.22}
.farspan .F{fill:#0072b2}
.farspan .B{fill:#e69f00}
.farspan .W{fill:#009e73}
.farspan .send{fill:#cc79a7}
.farspan .recv{fill:#009e73}
.farspan .hatch{stroke:#bcc5cf}
.farspan .onF{fill:#ffffff}
.farspan .onB{fill:#241800}
.farspan .onW{fill:#00150f}
.farspan g:hover>.cell{opacity:.8}
@media (prefers-color-scheme:dark){
.farspan text{fill:#e6edf3}
.farspan .muted{fill:#9198a1}
.farspan .card{fill:#0d1117;stroke:#30363d}
.farspan .track{fill:#1b222c}
.farspan .tick{stroke:#9198a1}
.farspan .F{fill:#3d9ae0}
.farspan .B{fill:#f0b232}
.farspan .W{fill:#2fbf94}
.farspan .send{fill:#db8fba}
.farspan .recv{fill:#2bb58c}
.farspan .hatch{stroke:#465160}
.farspan .onF{fill:#04121f}
.farspan .onB{fill:#241800}
.farspan .onW{fill:#00150f}
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The positions of things in pixels; `start_ns` is at `left`, `end_ns` at `right`."""

    start_ns: int
    end_ns: int
    width: int
    top: int
    lane: int
    gap: int
    num_ranks: int

    @property
    def left(self) -> int:
        return _MARGIN + _LABEL_WIDTH

    @property
    def right(self) -> int:
        return self.width - _MARGIN - _SHARE_WIDTH

    @property
    def bottom(self) -> int:
        """Lower edge of the last lane."""
        return self.top + max(1, self.num_ranks) * (self.lane + self.gap) - self.gap

    @property
    def height(self) -> int:
        return self.bottom + 24 + 26 + _MARGIN - 6

    def x(self, time_ns: float) -> float:
        time_ns = min(max(time_ns, self.start_ns), self.end_ns)
        return self.left + (time_ns - self.start_ns) / max(1, self.end_ns - self.start_ns) * (self.right - self.left)

    def y(self, rank: int) -> int:
        return self.top + rank * (self.lane + self.gap)


def svg(timeline: Timeline, *, width: int = 960, heading: bool = True) -> str:
    """Draws the timeline.

    Args:
        timeline: What to draw.
        width: Of the picture in pixels, at least 360; it scales without loss.
        heading: Whether title and summary stand above the lanes.

    Returns:
        A whole SVG document: write it to a file, or put it into an HTML page as it is. Light or dark as
        the reader prefers; each cell has a tooltip with the task's name and times.
    """
    start_ns, end_ns = timeline.window_ns
    lane, gap = (30, 8) if timeline.num_ranks <= 8 else (20, 4) if timeline.num_ranks <= 24 else (10, 2)
    top = 86 if heading else 44
    layout = _Layout(
        start_ns=start_ns,
        end_ns=end_ns,
        width=max(360, width),
        top=top,
        lane=lane,
        gap=gap,
        num_ranks=timeline.num_ranks,
    )
    key = f"farspan-{zlib.crc32(timeline.to_json().encode()):08x}"  # several pictures may share one page
    title = escape(timeline.title or "Timeline")
    facts = escape(_facts(timeline))
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="farspan" role="img" aria-labelledby="{key}-t {key}-d" '
            f'viewBox="0 0 {layout.width} {layout.height}" width="{layout.width}" height="{layout.height}">'
        ),
        f'<title id="{key}-t">{title}</title>',
        f'<desc id="{key}-d">{facts}. {escape(_description(timeline))}</desc>',
        f"<style>{_STYLE}</style>",
        (
            f'<defs><pattern id="{key}-h" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><path class="hatch" d="M1 0V6" stroke-width="1.5"/></pattern></defs>'
        ),
        f'<rect class="card" x=".5" y=".5" width="{layout.width - 1}" height="{layout.height - 1}" rx="8"/>',
    ]
    if heading:
        parts.append(f'<text class="title" x="{_MARGIN}" y="33">{title}</text>')
        parts.append(f'<text class="muted" x="{_MARGIN}" y="53">{facts}</text>')
    parts += _tracks(timeline, layout)
    parts += _axis(layout)
    for kind in _WORDS:
        parts += [_cell(span, layout, key) for span in timeline.spans if span.kind == kind and _visible(span, layout)]
    parts += _legend(timeline, layout, key)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _facts(timeline: Timeline) -> str:
    if not timeline.duration_s:
        return "no tasks"
    num_ranks, num_micro_batches = timeline.num_ranks, timeline.num_micro_batches
    return " | ".join(
        [
            format_seconds(timeline.duration_s),
            f"bubble {format_share(timeline.bubble, 1)}",
            count_of(num_ranks, "rank"),
            count_of(num_micro_batches, "micro-batch"),
        ]
    )


def _description(timeline: Timeline) -> str:
    return " ".join(f"Rank {r}: busy {format_share(timeline.busy_share(r))}." for r in range(timeline.num_ranks))


def _tracks(timeline: Timeline, layout: _Layout) -> list[str]:
    """Returns the empty lanes with their labels: what stays visible of a track is idle time."""
    share_x = layout.width - _MARGIN
    parts = [f'<text class="muted end" x="{share_x}" y="{layout.top - 10}">busy</text>']
    label_every = math.ceil(14 / (layout.lane + layout.gap))
    for rank in range(timeline.num_ranks):
        y = layout.y(rank)
        parts.append(
            f'<rect class="track" x="{layout.left}" y="{y}" width="{layout.right - layout.left}" '
            f'height="{layout.lane}" rx="3"/>'
        )
        if rank % label_every == 0:
            text_y = y + layout.lane / 2 + 4
            parts.append(f'<text x="{_MARGIN}" y="{text_y:g}">{escape(timeline.name_of(rank))}</text>')
            share = format_share(timeline.busy_share(rank))
            parts.append(f'<text class="end" x="{share_x}" y="{text_y:g}">{share}</text>')
    return parts


def _ticks(duration: float, most: int) -> tuple[float, list[float]]:
    """Returns a round step (1, 2 or 5 times a power of ten) and its multiples up to `duration`, at most `most` + 1.

    >>> _ticks(312.0, 8)
    (50.0, [0.0, 50.0, 100.0, 150.0, 200.0, 250.0, 300.0])
    """
    if duration <= 0:
        return 1.0, [0.0]
    power = 10.0 ** math.floor(math.log10(duration / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if duration / (power * factor) <= most)
    return step, [number * step for number in range(math.floor(duration / step * (1 + 1e-9)) + 1)]


def _axis(layout: _Layout) -> list[str]:
    unit, unit_ns = ("s", 1e9) if layout.end_ns - layout.start_ns >= 20e9 else ("ms", 1e6)
    most = max(2, (layout.right - layout.left) // _TICK_DISTANCE)
    step, ticks = _ticks((layout.end_ns - layout.start_ns) / unit_ns, most)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    parts = [f'<text class="muted end" x="{layout.left - 14}" y="{layout.bottom + 22}">{unit}</text>']
    for tick in ticks:
        x = layout.x(layout.start_ns + tick * unit_ns)
        parts.append(f'<path class="tick" d="M{x:.1f} {layout.top - 4}V{layout.bottom + 7}"/>')
        parts.append(f'<text class="muted mid" x="{x:.1f}" y="{layout.bottom + 22}">{tick:.{digits}f}</text>')
    return parts


def _visible(span: Span, layout: _Layout) -> bool:
    return span.end_ns > layout.start_ns and span.start_ns < layout.end_ns


def _cell(span: Span, layout: _Layout, key: str) -> str:
    x, y = layout.x(span.start_ns), layout.y(span.rank)
    width, height = layout.x(span.end_ns) - x, layout.lane
    hairline = min(1.0, 0.15 * width)  # between neighbours; thin cells would vanish behind a whole pixel
    x, width = x + hairline / 2, width - hairline
    if span.kind in ("send", "recv"):  # messages run beside tasks: a strip along the lane's lower edge
        height = max(2, layout.lane // 8)
        y += layout.lane - height
    width = max(width, 0.3)
    look = f'fill="url(#{key}-h)"' if span.kind == "wait" else f'class="cell {span.kind}"'
    cell = f'<rect {look} x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" rx="{min(2.5, width / 4):.2g}"/>'
    number = str(span.micro_batch)
    if span.kind in TASKS and span.micro_batch >= 0 and len(number) * _CHAR_WIDTH + 3 <= width and height >= 14:
        middle = y + height / 2 + 4
        cell += f'<text class="in on{span.kind}" x="{x + width / 2:.2f}" y="{middle:g}">{number}</text>'
    return f"<g><title>{escape(_tooltip(span, layout))}</title>{cell}</g>"


def _tooltip(span: Span, layout: _Layout) -> str:
    micro_batch = f", micro-batch {span.micro_batch}" if span.micro_batch >= 0 else ""
    since = (span.start_ns - layout.start_ns) / 1e6
    until = (span.end_ns - layout.start_ns) / 1e6
    return (
        f"{span.name or _WORDS[span.kind]}\n{_WORDS[span.kind]}{micro_batch}, rank {span.rank}\n"
        f"{format_seconds(span.duration_s)} ({since:.2f} to {until:.2f} ms)"
    )


def _legend(timeline: Timeline, layout: _Layout, key: str) -> list[str]:
    kinds = {span.kind for span in timeline.spans if _visible(span, layout)}
    x, y = float(layout.left), layout.bottom + 40
    parts: list[str] = []
    looks = {kind: f'class="{kind}"' for kind in _LEGEND} | {"wait": f'fill="url(#{key}-h)"'}
    entries = [*((looks[kind], _WORDS[kind]) for kind in _LEGEND if kind in kinds), ("", "idle")]
    for look, word in entries:
        box = f'x="{x:g}" y="{y}" width="14" height="14" rx="2.5"'
        parts.append(f'<rect class="track" {box}/>')  # below all, for waits are hatches on the track
        if look:
            parts.append(f"<rect {look} {box}/>")
        parts.append(f'<text class="muted" x="{x + 20:g}" y="{y + 11}">{word}</text>')
        x += 20 + len(word) * 6.6 + 24
    return parts

"""A step as one self-contained HTML page: numbers, timeline, plan, environment. No script, nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence

from farspan.report.markup import escape
from farspan.report.svg import svg
from farspan.report.text_report import format_share
from farspan.report.timeline import TASKS, Timeline
from farspan.units import format_seconds

__all__ = ["html"]

_STYLE = """
:root{color-scheme:light dark;--page:#f6f8fa;--card:#fff;--line:#d8dee4;--text:#1f2328;--muted:#59636e;
--forward:#0072b2;--backward:#e69f00;--weights:#009e73;--track:#eff2f5}
@media (prefers-color-scheme:dark){:root{--page:#010409;--card:#0d1117;--line:#30363d;--text:#e6edf3;
--muted:#9198a1;--forward:#3d9ae0;--backward:#f0b232;--weights:#2fbf94;--track:#1b222c}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 20px 48px}
h1{font-size:22px;line-height:1.25;margin:0 0 20px}
h2{font-size:15px;margin:32px 0 10px}
.note{margin:-6px 0 10px;color:var(--muted);font-size:12px}
.numbers{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:0 0 20px}
.numbers div,.card{background:var(--card);border:1px solid var(--line);border-radius:8px}
.numbers div{padding:12px 16px}
dt{color:var(--muted);font-size:12px}
dd{margin:2px 0 0;font-size:22px;font-weight:600;line-height:1.2;font-variant-numeric:tabular-nums}
.card{overflow-x:auto}
.timeline{overflow-x:auto}
.timeline svg{display:block;width:100%;min-width:640px;height:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:8px 16px;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
thead th{color:var(--muted);font-size:12px;font-weight:500}
tbody tr>*{border-top:1px solid var(--line);font-weight:400}
td.bar{width:32%}
.bar span{display:flex;height:10px;border-radius:3px;background:var(--track);overflow:hidden}
.bar i{display:block;height:100%}
pre{margin:0;padding:14px 16px;overflow-x:auto;
font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
footer{margin-top:32px;color:var(--muted);font-size:12px}
"""


_PLANNED = (
    "The plan's order of tasks, each as long as its like took in this step in the mean; without links and delays. "
    "busy: the share of that shorter step."
)
_MEASURED = "This step as it ran. busy: the share of its time in which a rank computed; so are the numbers at the top."
_PLAN = "As it was found before this step: peak memory and busy are what was predicted then."


def html(
    timeline: Timeline,
    *,
    title: str = "",
    planned: Timeline | None = None,
    shares: str = "",
    plan: str = "",
    environment: Sequence[str] = (),
    is_predicted: bool = False,
) -> str:
    """Returns the page.

    Args:
        timeline: The step.
        title: Heading of the page; by default the timeline's.
        planned: The same step by its schedule, drawn above it.
        shares: Where the time went, as a text table; left out where it is empty.
        plan: The plan as a text table, shown as it is; the section is left out where it is empty.
        environment: One fact per line ("torch 2.13.0", "2 x H100"); left out where it is empty.
        is_predicted: The step has been simulated, and not run.

    Returns:
        A whole HTML document with everything in it; all texts are escaped.
    """
    heading = escape(title or timeline.title or "farspan step")
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{heading}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{heading}</h1>",
        _numbers(timeline),
    ]
    if planned is not None:
        parts.append(_head("Planned", _PLANNED))
        parts.append(f'<div class="timeline">{svg(planned, width=1040, heading=False)}</div>')
        parts.append(_head("Measured", _MEASURED))
    parts.append(f'<div class="timeline">{svg(timeline, width=1040, heading=False)}</div>')
    if shares:
        parts.append(f'<h2>Where the time went</h2>\n<div class="card"><pre>{escape(shares)}</pre></div>')
    parts.append(_ranks(timeline))
    if plan:
        head = _head("Plan", "" if is_predicted else _PLAN)
        parts.append(f'{head}\n<div class="card"><pre>{escape(plan.strip(chr(10)))}</pre></div>')
    if environment:
        lines = "\n".join(escape(line) for line in environment)
        parts.append(f'<h2>Environment</h2>\n<div class="card"><pre>{lines}</pre></div>')
    kind = "A prediction: nothing has been run. " if is_predicted else ""
    parts.append(f"<footer>Written by farspan. {kind}Times run from the first task to the last on any rank.</footer>")
    parts.append("</main>\n</body>\n</html>\n")
    return "\n".join(parts)


def _head(words: str, note: str) -> str:
    """Returns a heading, with a line below it that says what the numbers under it are."""
    return f"<h2>{words}</h2>" + (f'\n<p class="note">{escape(note)}</p>' if note else "")


def _numbers(timeline: Timeline) -> str:
    shares = [timeline.busy_share(rank) for rank in range(timeline.num_ranks)]
    rows = (
        ("Step time", format_seconds(timeline.duration_s)),
        ("Bubble", format_share(timeline.bubble, 1)),
        ("Least busy rank", format_share(min(shares, default=0.0))),
        ("Most busy rank", format_share(max(shares, default=0.0))),
        ("Micro-batches", str(timeline.num_micro_batches)),
        ("Ranks", str(timeline.num_ranks)),
    )
    cells = "\n".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in rows)
    return f'<dl class="numbers">\n{cells}\n</dl>'


def _ranks(timeline: Timeline) -> str:
    head = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("Rank", "Forward", "Backward", "Weight gradients", "Compute", "Waiting", "Other", "Busy")
    )
    rows = "\n".join(_rank(timeline, rank) for rank in range(timeline.num_ranks))
    return (
        '<h2>Ranks</h2>\n<div class="card"><table>\n'
        f'<thead><tr>{head}<th scope="col"></th></tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>'
    )


def _rank(timeline: Timeline, rank: int) -> str:
    duration_s = timeline.duration_s
    tasks_s = [timeline.time_s(rank, kind) for kind in TASKS]
    known_s = timeline.time_s(rank, *TASKS, "wait")
    times_s = (*tasks_s, timeline.busy_s(rank), timeline.wait_s(rank), max(0.0, duration_s - known_s))
    cells = "".join(f"<td>{format_seconds(time_s)}</td>" for time_s in times_s)
    bar = "".join(
        f'<i style="width:{100 * time_s / duration_s if duration_s else 0:.2f}%;background:var(--{name})"></i>'
        for name, time_s in zip(("forward", "backward", "weights"), tasks_s, strict=True)
    )
    share = format_share(timeline.busy_share(rank))
    name = escape(timeline.name_of(rank))
    return f'<tr><th scope="row">{name}</th>{cells}<td>{share}</td><td class="bar"><span>{bar}</span></td></tr>'

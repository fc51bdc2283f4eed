"""A simulated step as a timeline and as a page."""

from __future__ import annotations

from collections.abc import Sequence

from farspan.planner import Simulation
from farspan.report.html import html
from farspan.report.timeline import Kind, Span, Timeline
from farspan.schedule import Kind as TaskKind

__all__ = ["predicted_page", "timeline_of"]

_KINDS: dict[TaskKind, Kind] = {TaskKind.FORWARD: "F", TaskKind.BACKWARD: "B", TaskKind.WEIGHT: "W"}


def timeline_of(simulation: Simulation, *, title: str = "", names: Sequence[str] = ()) -> Timeline:
    """Returns the tasks of a simulated step, whose times are seconds.

    Args:
        simulation: The step.
        title: For people.
        names: What each rank runs, for people.
    """
    spans = [
        Span(
            rank=task.rank,
            kind=_KINDS[task.kind],
            name=names[task.rank] if names else f"stage {task.level}",
            micro_batch=task.micro_batch,
            start_ns=round(start * 1e9),
            end_ns=round(end * 1e9),
        )
        for task, start, end in zip(simulation.schedule.tasks, simulation.starts, simulation.ends, strict=True)
    ]
    return Timeline(spans=tuple(spans), num_ranks=simulation.schedule.num_ranks, title=title)


def predicted_page(
    simulation: Simulation, *, title: str, names: Sequence[str], plan: str, environment: Sequence[str] = ()
) -> str:
    """Returns the step as one self-contained HTML page.

    Args:
        simulation: The step.
        title: Heading of the page.
        names: What each rank runs.
        plan: The plan and all that is to be said of it, as text.
        environment: One fact per line.
    """
    timeline = timeline_of(simulation, title=title, names=names)
    return html(timeline, title=title, plan=plan, environment=environment, is_predicted=True)

"""A schedule as text, simulated with whole durations: one column for each unit of time."""

from __future__ import annotations

from farspan.planner import own_links, simulate
from farspan.schedule import Schedule

__all__ = ["draw", "picture_in"]


def draw(schedule: Schedule, *, latency: int = 0) -> str:
    """One line for each rank; the second stage of a rank is in small letters, `--` goes on with a task."""
    simulated = simulate(schedule, link_of=own_links(latency=latency))
    lines: list[str] = []
    for rank, order in enumerate(schedule.orders):
        first_level = min(schedule.tasks[index].level for index in order)
        cells: list[str] = []
        for index in order:
            task = schedule.tasks[index]
            name = f"{task.kind.value}{task.micro_batch}"
            cells += [".."] * (round(simulated.starts[index]) - len(cells))
            cells.append(name if task.level == first_level else name.lower())
            cells += ["--"] * (round(task.duration) - 1)
        lines.append(f"rank {rank}   {' '.join(cells)}")
    return "\n".join(lines)


def picture_in(text: str | None) -> list[str]:
    """The pictures in a docstring."""
    pictures: list[str] = []
    is_inside = False
    for line in map(str.strip, (text or "").splitlines()):
        if line.startswith("rank 0 "):
            pictures.append(line)
        elif is_inside and line.startswith("rank "):
            pictures[-1] += "\n" + line
        is_inside = line.startswith("rank ")
    return pictures

"""Explains why a module lies where it does under a plan, from the plan alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from farspan.errors import PlanError
from farspan.plan.table import compress_runs, format_numbers

__all__ = ["explain"]


def explain(
    name: str,
    *,
    stages: Sequence[str],
    placement: Mapping[str, int],
    estimates: Mapping[str, Sequence[float]],
) -> str:
    """Returns text that says which entry decides for a module or parameter, what else its stage has, and what the stage
    takes.

    Args:
        name: Of the module or parameter.
        stages: Device strings.
        placement: Names and globs to stages.
        estimates: Numbers by stage.

    Raises:
        PlanError: No entry of the plan means it.
    """
    above = _above(name)
    decides = {node: entry for entry in placement if (node := _meant(entry, above)) is not None}  # the later wins
    decides |= {entry: entry for entry in placement if entry in above}  # an exact name beats a glob
    near = next((node for node in above if node in decides), None)
    if near is None:
        below = compress_runs([entry for entry in placement if not name or entry.startswith(f"{name}.")])
        raise PlanError(
            f"no entry of the plan places '{name}'.",
            why=f"its parts lie apart: {', '.join(below[:6])}" if below else "there is no such name, nor one above it.",
            hint=f'plan.explain("{next(iter(placement))}")',
        )
    entry = decides[near]
    stage = placement[entry]
    lines = [f"{name or 'the whole model'} lies on stage {stage}, {stages[stage]}, by the entry {entry!r}"]
    others = compress_runs([each for each, at in placement.items() if at == stage and each != entry])
    lines.append(f"  beside it: {', '.join(others)}" if others else "  nothing else lies there")
    numbers = format_numbers(estimates, stage)
    if numbers:
        lines.append("  the stage: " + ", ".join(f"{title} {number}" for title, number in numbers))
    return "\n".join(lines)


def _meant(entry: str, above: Sequence[str]) -> str | None:
    """Returns the outermost of the names that a glob matches, which is where it counts."""
    return next((node for node in reversed(above) if fnmatchcase(node, entry)), None)


def _above(name: str) -> list[str]:
    """`name` and the names above it, nearest first, the whole model last.

    >>> _above("blocks.3.mlp")
    ['blocks.3.mlp', 'blocks.3', 'blocks', '']
    """
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]

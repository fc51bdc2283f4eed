"""`farspan plan --recalibrate step.json train.py`: a plan from what a step under the last one has shown."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farspan.units import count_of

if TYPE_CHECKING:
    from farspan.cluster import Cluster
    from farspan.plan import Plan
    from farspan.plan.hints import Hints
    from farspan.planner.cost_model import CostedGraph
    from farspan.planner.optimize import Recalibration, SearchResult, StageSeconds
    from farspan.report import MeasuredStep

__all__ = ["Measured", "format_recalibration", "read_measured", "recalibrated"]

_HINT = "farspan run -n 2 --report step.json train.py, with the plan that farspan plan has written last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A step that was measured, and the plan it ran under.

    Attributes:
        plan_path: The plan's file.
        step_path: The step's file.
        plan: As it is in its file.
        step: As it is in its file.
    """

    plan_path: str
    step_path: str
    plan: Plan
    step: MeasuredStep


def read_measured(plan: str | os.PathLike[str], step: str) -> Measured:
    """Read what `farspan plan` and `farspan run --report` have written.

    Raises:
        PlanError: A file cannot be read, or is not what it should be.
    """
    from farspan.plan import Plan
    from farspan.report import MeasuredStep

    return Measured(plan_path=os.fspath(plan), step_path=step, plan=Plan.load(plan), step=MeasuredStep.load(step))


def recalibrated(
    result: SearchResult, graph: CostedGraph, cluster: Cluster, *, measured: Measured, hints: Hints
) -> Recalibration:
    """Look again with the seconds of a measured step.

    Args:
        result: What was found without it.
        graph: In which costs.
        cluster: Where.
        measured: The step, and the plan that it ran under: the one of `result`.
        hints: What `result` was found with.

    Raises:
        PlanError: The step ran under another plan.
    """
    from farspan.errors import PlanError
    from farspan.planner.optimize import recalibrate

    plan, step = measured.plan_path, measured.step_path
    if measured.plan != result.best.plan:
        raise PlanError(
            f"{plan} is not the plan for these costs and this cluster.",
            why="the step's seconds belong to the stages of the plan it ran under.",
            hint=f"farspan plan with the same arguments, but for --recalibrate; then\n{_HINT}",
        )
    best = result.best
    seconds = _seconds_of(measured.step)
    if set(seconds) != set(best.plan.ranks) or _num_micro_batches(measured.step) != best.num_micro_batches:
        raise PlanError(
            f"{step} is a step of {_size(_num_micro_batches(measured.step), len(seconds))}.",
            why=f"{plan} is for {_size(best.num_micro_batches, best.plan.num_ranks)}.",
            hint=_HINT,
        )
    by_stage = [seconds[best.plan.rank_of(number)] for number in range(len(best.stages))]
    return recalibrate(graph, cluster, best, by_stage, measured.step.timeline.duration_s, hints=hints)


def _size(num_micro_batches: int, num_ranks: int) -> str:
    return f"{count_of(num_micro_batches, 'micro-batch')} on {count_of(num_ranks, 'rank')}"


def format_recalibration(found: Recalibration) -> str:
    """Returns text on what was off, and what another plan gains."""
    from farspan.units import format_seconds

    off = ", ".join(
        f"{stage.where} {round(100 * (factor - 1)):+d} %"
        for stage, factor in zip(found.ran.stages, found.factors, strict=True)
    )
    return (
        f"measured work against the plan's: {off}\n"
        f"the step took {format_seconds(found.measured_s)}; with these costs "
        f"{format_seconds(found.ran.step_s)} is predicted (off by {100 * found.error:.0f} %),\n"
        f"and {format_seconds(found.result.best.step_s)} for the best plan now: "
        + (
            f"{100 * found.gain:.0f} % less"
            if found.is_worth_it
            else f"{100 * found.gain:.0f} % less is no more than that error, so the plan stays"
        )
    )


def _seconds_of(step: MeasuredStep) -> dict[int, StageSeconds]:
    """Returns the seconds of each rank; a rank has one stage."""
    from farspan.planner.optimize import StageSeconds
    from farspan.schedule import Kind

    forward_s: dict[int, float] = {}
    backward_s: dict[int, float] = {}
    for index, span in step.spans.items():
        task = step.schedule.tasks[index]
        of_kind = forward_s if task.kind is Kind.FORWARD else backward_s
        of_kind[task.rank] = of_kind.get(task.rank, 0.0) + span.duration_s
    count = max(_num_micro_batches(step), 1)
    return {
        rank: StageSeconds(forward_s=seconds / count, backward_s=backward_s.get(rank, 0.0) / count)
        for rank, seconds in forward_s.items()
    }


def _num_micro_batches(step: MeasuredStep) -> int:
    return len({task.micro_batch for task in step.schedule.tasks if task.micro_batch >= 0})

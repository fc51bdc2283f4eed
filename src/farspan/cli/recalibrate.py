"""`farspan plan --recalibrate step.json train.py`: a plan from what a step under the last one has shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farspan.cluster import Cluster
    from farspan.plan.hints import Hints
    from farspan.planner.answer import Answer, Recalibration, StageSeconds
    from farspan.planner.costed import CostedGraph
    from farspan.report import MeasuredStep

__all__ = ["format_recalibration", "recalibrated"]

_HINT = "farspan run -n 2 --report step.json train.py, with the plan that farspan plan has written last"


def recalibrated(
    answer: Answer, graph: CostedGraph, cluster: Cluster, *, plan: Path, step: Path, hints: Hints
) -> Recalibration:
    """Look again with the seconds of a measured step.

    Args:
        answer: What was found without it.
        graph: In which costs.
        cluster: Where.
        plan: The file of the plan that the step ran under: the one of `answer`.
        step: The file that `farspan run --report` has written.
        hints: What `answer` was found with.

    Raises:
        PlanError: A file cannot be read, or the step ran under another plan.
    """
    from farspan.errors import PlanError
    from farspan.plan import Plan
    from farspan.planner.answer import recalibrate
    from farspan.report import MeasuredStep

    try:
        measured = MeasuredStep.from_json(step.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{step} cannot be read.", why=str(error), hint=_HINT) from error
    if Plan.load(plan) != answer.best.plan:
        raise PlanError(
            f"{plan} is not the plan for these costs and this cluster.",
            why="the step's seconds belong to the stages of the plan it ran under.",
            hint=f"farspan plan with the same arguments, but for --recalibrate; then\n{_HINT}",
        )
    best = answer.best
    seconds = _seconds_of(measured)
    if set(seconds) != set(best.plan.ranks) or _num_micro_batches(measured) != best.num_micro_batches:
        raise PlanError(
            f"{step} is a step of {_num_micro_batches(measured)} micro-batches on {len(seconds)} ranks.",
            why=f"{plan} is for {best.num_micro_batches} micro-batches on {best.plan.num_ranks} ranks.",
            hint=_HINT,
        )
    by_stage = [seconds[best.plan.rank_of(number)] for number in range(len(best.stages))]
    return recalibrate(graph, cluster, best, by_stage, measured.timeline.duration_s, hints=hints)


def format_recalibration(found: Recalibration) -> str:
    """What was off, and what is gained by another plan."""
    from farspan.units import format_seconds

    off = ", ".join(
        f"{stage.where} {round(100 * (factor - 1)):+d} %"
        for stage, factor in zip(found.ran.stages, found.factors, strict=True)
    )
    return (
        f"measured work against the plan's: {off}\n"
        f"the step took {format_seconds(found.measured_s)}; with these costs "
        f"{format_seconds(found.ran.step_s)} is predicted (off by {100 * found.error:.0f} %),\n"
        f"and {format_seconds(found.answer.best.step_s)} for the best plan now: "
        + (
            f"{100 * found.gain:.0f} % less"
            if found.is_worth_it
            else f"{100 * found.gain:.0f} % less is no more than that error, so the plan stays"
        )
    )


def _seconds_of(step: MeasuredStep) -> dict[int, StageSeconds]:
    """By rank; a rank has one stage."""
    from farspan.planner.answer import StageSeconds
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

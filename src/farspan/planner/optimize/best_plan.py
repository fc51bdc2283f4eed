"""Finds the best plan that `distribute` can run, and says why those next to it are worse."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace

from farspan.cluster import Cluster, DeviceClass
from farspan.plan.hints import Hints
from farspan.planner.bound import CLOSE, Bound, bound_of
from farspan.planner.constraints import HintedProblem, hinted_problem
from farspan.planner.cost_model import CostedGraph
from farspan.planner.mesh.wide import best_wide
from farspan.planner.optimize.fitting import fitting, rules_of
from farspan.planner.optimize.impossible import nothing_fits
from farspan.planner.optimize.moves import Judge, improved
from farspan.planner.optimize.orders import Orders
from farspan.planner.pipeline import Pipeline
from farspan.planner.prediction import Prediction, can_run
from farspan.units import format_seconds

__all__ = ["SearchResult", "RejectedPlan", "best_plan"]

_MOST_SINGLE_DEVICES = 8
_WITHIN = (1.01, 1.06, 1.13, 1.25)
"""Times the bound: the devices that allow such steps are tried."""
_CLOSE = 1e-3
"""The share by which that bound may be less than it could be."""
_WIDE_GAINS = 0.99
"""A plan with wide stages, which sends more, takes so many times the step at most."""
_OTHERS_WORK = 1e9
"""Elementary steps of searches after which no other plans than the best are tried; some 3 s."""
_OTHERS_TASKS = 50_000
"""Simulated tasks after which, of other numbers of devices, no plan that is hard to find is looked for; some 1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedPlan:
    """A plan that was not taken.

    Attributes:
        what: In words.
        step_s: Its step; infinite where it does not fit.
        why: Why another is better.
        pipeline: The plan; None where there is none.
    """

    what: str
    step_s: float
    why: str
    pipeline: Pipeline | None = None


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search for the user's cluster.

    Attributes:
        best: The plan.
        rejected: The others, the best first.
        search_s: Seconds of all searches together.
        problem: What was searched: the graph and the cluster, as the hints have made them.
        num_micro_batches: Of a step.
    """

    best: Prediction
    rejected: tuple[RejectedPlan, ...]
    search_s: float
    problem: HintedProblem
    num_micro_batches: int

    @functools.cached_property
    def bound(self) -> float:
        """The seconds that no plan of consecutive stages is below; found when it is asked for.

        A plan in which the units of a device do not follow each other may be: of a U-Net such a plan was simulated
        0.2 % below.
        """
        return _bound_of(self.problem, self.num_micro_batches).below(self.best.step_s)

    @property
    def is_one_device(self) -> bool:
        """Returns whether one device alone was found to be the fastest, and not asked for by hints."""
        return len(self.best.stages) == 1 and not self.problem.hints

    @property
    def gap(self) -> float:
        """Returns how much better, as a share of its step, the best plan can be at most."""
        return max(0.0, 1.0 - self.bound / self.best.step_s) if self.best.step_s else 0.0


def best_plan(
    graph: CostedGraph,
    cluster: Cluster,
    num_micro_batches: int,
    *,
    hints: Hints | None = None,
    may_be_wide: bool = False,
    reduction: str | None = "exact",
) -> SearchResult:
    """Find the plan for a step.

    Args:
        graph: Its nodes are modules or parameters of the model.
        cluster: What there is to run it on; not all of it has to be used.
        num_micro_batches: Of a step.
        hints: What the user wants of the plan. Ranks in it are the devices of `cluster`, counted host by host; a plan
            has a stage on each rank up to the last that something is pinned to.
        may_be_wide: Whether it may have wide stages; they are rejected otherwise. Hints about places, or about what is
            computed again, rule them out.
        reduction: How the gradients of these are added up, as for `predict_step`.

    Raises:
        PlanError: Hints name what is not there, or nothing fits: says which hint is in the way, or what would help.
    """
    began = time.monotonic()
    problem = hinted_problem(graph, cluster, hints or Hints())
    searched = fitting(problem, problem.cluster, num_micro_batches)
    whole = searched.best
    if whole is None:
        tried_s = None if searched.is_certain else time.monotonic() - began
        raise nothing_fits(graph, cluster, num_micro_batches, hints or Hints(), tried_s=tried_s)
    rejected: list[RejectedPlan] = []
    found, work, num_tasks = [whole], whole.pipeline.work, 0.0
    for count in _counts(problem, len(whole.stages)):
        if count == len(whole.stages) or work > _OTHERS_WORK:
            continue
        searched = fitting(
            problem,
            _only(problem, whole.pipeline, count),
            num_micro_batches,
            is_question=num_tasks > _OTHERS_TASKS,
        )
        each, num_tasks = searched.best, num_tasks + searched.num_tasks
        work += whole.pipeline.work if each is None else each.pipeline.work
        if each is None:
            memory = "its memory" if count == 1 else "their memory"
            why = f"it does not fit into {memory}" if searched.is_certain else f"none was found that fits into {memory}"
            rejected.append(RejectedPlan(what=_devices(count), step_s=float("inf"), why=why))
        else:
            found.append(each)
    # The search knows neither what runs beside a transfer nor what fills a gap: what is simulated decides.
    rules = replace(rules_of(problem, num_micro_batches), counts_working=False)
    orders = Orders(problem.searched, problem.cluster, rules)
    allowed: list[tuple[str, ...]] = []
    if len(problem.cluster.classes) > 1 or len(whole.stages) > _MOST_SINGLE_DEVICES:  # else all numbers have been tried
        bound = _bound_of(problem, num_micro_batches, close=_CLOSE)
        allowed = [bound.devices_within(times * bound.seconds) for times in _WITHIN]
    best = improved(found, orders, Judge(problem, num_micro_batches), allowed)
    by_count: dict[int, Prediction] = {}
    for each in sorted(found, key=lambda each: each.step_s):
        by_count.setdefault(len(each.stages), each)
    rejected += [_rejected(each, best) for count, each in by_count.items() if count != len(best.stages)]
    is_free = not problem.hints.are_about_places and problem.hints.remat is None
    wide = best_wide(graph, cluster, num_micro_batches, reduction=reduction) if is_free else None
    if wide is not None and wide.step_s < best.step_s * _WIDE_GAINS:
        other, why = (best, "wide stages keep more devices busy") if may_be_wide else (wide, 'stages="wide" runs it')
        best = wide if may_be_wide else best
        rejected.append(RejectedPlan(what=_what(other), step_s=other.step_s, why=why, pipeline=other.pipeline))
    return SearchResult(
        best=_with_remat(best, problem),
        rejected=tuple(sorted(rejected, key=lambda each: each.step_s)),
        search_s=time.monotonic() - began,
        problem=problem,
        num_micro_batches=num_micro_batches,
    )


def _bound_of(problem: HintedProblem, num_micro_batches: int, *, close: float = CLOSE) -> Bound:
    return bound_of(
        problem.graph,
        problem.cluster,
        num_micro_batches,
        num_stages=problem.hints.stages,
        is_chain=problem.is_chain,
        close=close,
    )


def _with_remat(best: Prediction, problem: HintedProblem) -> Prediction:
    """Returns the same, saying what the hints have computed again."""
    remat = problem.hints.remat
    if remat is None:
        return best
    stages = tuple(
        replace(stage, remat=tuple(name for name in stage.nodes if name in problem.again)) for stage in best.stages
    )
    again = remat if isinstance(remat, bool) else tuple(remat)
    return replace(best, plan=replace(best.plan, remat=again), stages=stages)


def _what(each: Prediction) -> str:
    """Returns a plan in words, with the devices of each stage where some have several."""
    if can_run(each.pipeline):
        return _devices(len(each.stages))
    return f"stages of {'-'.join(str(stage.replicas) for stage in each.pipeline.stages)} devices"


def _counts(problem: HintedProblem, most: int) -> list[int]:
    """Returns numbers of devices to compare: all up to a few, then powers of two; those that hints allow."""
    few = range(1, min(most, _MOST_SINGLE_DEVICES) + 1)
    counts = {*few, most, *(2**power for power in range(3, most.bit_length()))}
    return [most] if problem.hints.stages is not None else sorted(each for each in counts if each >= problem.num_named)


def _only(problem: HintedProblem, pipeline: Pipeline, count: int) -> Cluster:
    """Returns at most `count` devices: those that must have a stage; and of each class as many as the best plan has,
    those of the fastest stages first.
    """
    names = [stage.device_class for stage in pipeline.stages]
    order = [name for name, number in problem.least.items() for _ in range(number)]
    for each in sorted(problem.cluster.classes, key=lambda each: -each.speed):
        order += [each.name] * max(0, names.count(each.name) - order.count(each.name))
    order = order[:count]
    return Cluster(
        classes=tuple(_first(each, order.count(each.name)) for each in problem.cluster.classes if each.name in order)
    )


def _first(kind: DeviceClass, count: int) -> DeviceClass:
    """Returns a class with the first so many of its devices, or with whole hosts of them."""
    if kind.part_of:
        return replace(kind, indices=kind.indices[:count])
    if count <= kind.devices_per_host:
        return replace(kind, num_hosts=1, devices_per_host=count)
    return replace(kind, num_hosts=-(-count // kind.devices_per_host))


def _devices(count: int) -> str:
    return "one device" if count == 1 else f"{count} devices"


def _rejected(each: Prediction, best: Prediction) -> RejectedPlan:
    slowest = max(each.stages, key=lambda stage: stage.forward_s + stage.backward_s)
    of_best = max(stage.forward_s + stage.backward_s for stage in best.stages)
    taken = slowest.forward_s + slowest.backward_s
    if taken > of_best * 1.01:
        taken, least = format_seconds(taken), format_seconds(of_best)
        why = f"{slowest.where} takes {taken} for each micro-batch, the slowest rank of the plan {least}"
    elif each.bubble > best.bubble:
        why = f"its bubble is {100 * each.bubble:.0f} %, the plan's {100 * best.bubble:.0f} %"
    else:
        why = "its transfers take longer"
    return RejectedPlan(what=_devices(len(each.stages)), step_s=each.step_s, why=why, pipeline=each.pipeline)

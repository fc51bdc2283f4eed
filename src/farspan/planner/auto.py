"""The plan one gets without asking: stages of equal estimated cost, cut between blocks where that is as good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from farspan.cluster import Cluster, DeviceClass
from farspan.errors import PlanError
from farspan.plan import Plan
from farspan.plan.hints import Hints, meaning_of
from farspan.planner.constraints import hinted_problem
from farspan.planner.cost_model import WHOLE_MODEL, CostedEdge, CostedGraph, CostedNode
from farspan.planner.mesh.widths import cuts_and_widths
from farspan.planner.model_unit import Unit, cut_costs, placement_of
from farspan.planner.optimize.impossible import in_the_way
from farspan.planner.partition import partition
from farspan.planner.partition_dp.stages import Rules
from farspan.planner.pipeline import plan_pipeline
from farspan.planner.prediction import Prediction, predict_step
from farspan.units import count_of

__all__ = ["auto_plan"]

_SLACK = 0.05
"""A cut inside a block makes it a container, recorded op by op: worth it for more than this share of a stage."""
_COPIES = 2
"""Copies of a parameter that hold memory, as far as is known before a step: itself, and its gradient."""


def auto_plan(units: Sequence[Unit], *, num_stages: int, devices: Sequence[str], hints: Hints | None = None) -> Plan:
    """Cut `units`, in the order in which they run, into stages of equal cost.

    Of memory only the parameters are known: `max_memory` is compared with the size of a stage's parameters and of as
    large gradients, without optimizer state and activations.

    Args:
        units: What there is to place; together they hold every parameter.
        num_stages: How many stages; each gets at least one unit. If there are more devices than that, stages get
            several, so that the slowest is as fast as can be.
        devices: Stage k lies on devices[k % len(devices)], if there are no more of them than stages.
        hints: Pins, groups and memory that the plan is to keep, with one stage on each rank.

    Raises:
        PlanError: There are fewer units than stages, or hints cannot be kept.

    Example:
        >>> units = [Unit(name=f"blocks.{i}", cost=1.0) for i in range(4)]
        >>> auto_plan(units, num_stages=2, devices=["rank:0", "rank:1"]).placement
        {'blocks.0': 0, 'blocks.1': 0, 'blocks.2': 1, 'blocks.3': 1}
    """
    if num_stages < 1 or not devices:
        raise PlanError(
            f"no plan has {count_of(num_stages, 'stage')} on {count_of(len(devices), 'device')}.",
            why="there must be at least one stage and one device.",
            hint='auto_plan(units, num_stages=1, devices=["rank:0"])',
        )
    if hints is not None and hints.are_about_places:
        return _hinted_plan(units, num_stages, len(devices), hints)
    places = [devices[stage % len(devices)] for stage in range(num_stages)]
    if 1 <= num_stages < len(devices) and len(units) >= num_stages:
        stage_of, widths = cuts_and_widths([unit.cost for unit in units], num_stages, len(devices))
        ends = [0, *accumulate(widths)]
        places = ["+".join(devices[begin:end]) for begin, end in pairwise(ends)]
        placement = placement_of(units, stage_of) if num_stages > 1 else {"": 0}
    elif num_stages == 1:  # holds for a model without any parameter too
        stage_of, placement = [0] * len(units), {"": 0}
    elif len(units) < num_stages:
        raise _too_few(units, num_stages, devices, hints)
    else:
        stage_of = partition([unit.cost for unit in units], num_stages, cut_costs=cut_costs(units), slack=_SLACK)
        placement = placement_of(units, stage_of)
    return Plan(
        stages=tuple(places),
        placement=placement,
        estimates=_estimates(units, stage_of, num_stages),
    )


def _too_few(units: Sequence[Unit], num_stages: int, devices: Sequence[str], hints: Hints | None) -> PlanError:
    """Returns the error for a model of fewer units than stages.

    Args:
        units: Its.
        num_stages: As many as there are devices, or as the user has asked for.
        devices: One rank each, or as many as split a stage between them.
        hints: With pins, together or max_memory there is one stage on each rank.
    """
    most, width = len(units) or 1, devices[0].count("rank:") or 1
    is_asked = num_stages != len(devices) or (hints is not None and hints.stages is not None)
    launch = f"farspan run -n {most * width}"
    fewer = f"farspan.distribute(model, stages={most})"
    wide = f"{fewer}{', whose stages have several ranks' * (most < len(devices))}"
    is_fixed = width > 1 or (hints is not None and hints.are_about_places)
    if is_asked:  # what is asked for holds in each group, and on any number of ranks
        hint = f"{fewer} and {launch}" if is_fixed else wide
    else:
        hint = f"{'' if is_fixed or not units else f'{wide}; or '}{launch}, or data_parallel={num_stages}"
    return PlanError(
        f"no plan has {count_of(num_stages, 'stage')} for this model.",
        why=f"{_named(units)}.",
        hint=hint,
    )


def _named(units: Sequence[Unit]) -> str:
    """Says which modules can be placed, for an error."""
    if not units:
        return "none of its modules has parameters, and one without goes where its inputs are"
    names = [repr(unit.name) if unit.name else "the whole model" for unit in units]
    many = f"{len(names)} modules with parameters can be placed on their own"
    return f"{many if len(names) > 1 else '1 module with parameters can be placed on its own'}: {', '.join(names)}"


def _hinted_plan(units: Sequence[Unit], num_stages: int, num_ranks: int, hints: Hints) -> Plan:
    """Returns the plan whose costliest stage costs least among those that keep the hints."""
    names = [unit.name for unit in units]
    if num_stages != num_ranks:
        raise PlanError(
            f"stages={num_stages} on {count_of(num_ranks, 'rank')} cannot be planned with pins, together or "
            "max_memory.",
            why="with these an automatic plan has one stage on each rank.",
            hint=f"stages={num_ranks}, or a plan of your own: plan={{'embed': 'rank:0', ...}}",
        )
    meaning_of(hints, names, num_ranks)  # raises if they mean nothing
    if len(units) < num_stages:
        raise _too_few(units, num_stages, [f"rank:{rank}" for rank in range(num_ranks)], hints)
    nodes = tuple(
        CostedNode(
            name=unit.name or WHOLE_MODEL, forward_s=unit.cost, memory_bytes=float(_COPIES * unit.parameter_bytes)
        )
        for unit in units
    )
    mean = sum(unit.cost for unit in units) / num_stages
    edges = tuple(
        CostedEdge(source=above.name, target=below.name, time_s=_SLACK * mean * cost)
        for (above, below), cost in zip(pairwise(nodes), cut_costs(units)[1:], strict=True)
    )
    graph = CostedGraph(nodes=nodes, edges=edges, source="the model")
    found = _hinted(graph, num_ranks, hints)
    if found is None:
        raise in_the_way(hints, lambda others: _hinted(graph, num_ranks, others) is not None, is_estimate=True)
    stage_of = {name: number for number, stage in enumerate(found.stages) for name in stage.nodes}
    return replace(
        found.plan, schedule="auto", estimates=_estimates(units, [stage_of[node.name] for node in nodes], num_stages)
    )


def _hinted(graph: CostedGraph, num_ranks: int, hints: Hints) -> Prediction | None:
    cluster = Cluster(classes=(DeviceClass(name="rank", kind="rank", devices_per_host=num_ranks),))
    problem = hinted_problem(graph, cluster, replace(hints, stages=num_ranks, remat=None))
    rules = Rules(micro_batches=1, passes=1.0, max_replicas=1, num_stages=num_ranks, least=problem.least)
    try:
        pipeline = plan_pipeline(problem.searched, problem.cluster, rules=rules, objective="bottleneck")
    except PlanError:
        return None
    return predict_step(problem.graph, problem.cluster, pipeline, 1)


def _estimates(units: Sequence[Unit], stage_of: Sequence[int], num_stages: int) -> dict[str, list[float]]:
    costs, counts, sizes = [0.0] * num_stages, [0] * num_stages, [0] * num_stages
    for unit, stage in zip(units, stage_of, strict=True):
        costs[stage] += unit.cost
        counts[stage] += unit.num_parameters
        sizes[stage] += unit.parameter_bytes
    total = sum(costs) or 1.0
    return {
        "num_parameters": [*counts],
        "parameter_bytes": [*sizes],
        "share": [round(cost / total, 4) for cost in costs],
    }

"""Writes the result of a search as text, for a terminal and for the report."""

from __future__ import annotations

import math

from farspan.errors import PlanError
from farspan.plan.table import compress_runs
from farspan.planner.optimize.best_plan import SearchResult
from farspan.planner.optimize.moves import Borders
from farspan.planner.prediction import Prediction, predict_step
from farspan.units import count_of, format_bytes, format_seconds

__all__ = ["explain", "format_result"]

_MOST_LINKS = 8
_LITTLE = 0.0005
"""The share of a step that is written as 0.1 %: less is nothing."""


def format_result(result: SearchResult, *, spread: float = 0.0) -> str:
    """Returns the plan, the step it gives, and the next best plans.

    Args:
        result: What was found.
        spread: By how much the seconds differ from which it was found, as a share of them.
    """
    best = result.best
    lines = [str(best.plan)]
    if len({stage.device for stage in best.stages}) > 1:
        lines.append(f"ranks {_ranks(best)}")
    if result.is_one_device:
        lines.append("do not distribute: one device is fastest")
    error = f" +- {100 * spread:.0f} %" if spread else ""
    step = f"step {format_seconds(best.step_s)}{error}, bubble {100 * best.bubble:.0f} %"
    micro_batches = count_of(best.num_micro_batches, "micro-batch")
    lines.append(f"{step}, {micro_batches} (forward and backward, without the optimizer)")
    if best.num_micro_batches == 1 and result.problem.cluster.num_devices > 1:
        lines.append(
            "with one micro-batch devices work one after the other; with several they overlap: "
            "farspan.distribute(model, micro_batches=8)"
        )
    kept = " that keeps the hints" if result.problem.hints else ""
    lines.append(
        f"no plan of consecutive stages{kept} takes less than {format_seconds(result.bound)}: "
        f"{_to_be_won(result)}; searched for {format_seconds(result.search_s)}"
    )
    lines += _hinted(result)
    lines += _links(best)
    if result.rejected:
        rows = [
            (each.what, format_seconds(each.step_s) if math.isfinite(each.step_s) else "-", each.why)
            for each in result.rejected
        ]
        width, times = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
        lines += ["others", *(f"  {what.ljust(width)}  {time.rjust(times)}  {why}" for what, time, why in rows)]
    return "\n".join(lines)


def _to_be_won(result: SearchResult) -> str:
    """Returns in words how far the plan is from the bound: what another one could win."""
    is_best = result.gap < _LITTLE
    return "this is the fastest of them" if is_best else f"another one could win at most {100 * result.gap:.1f} %"


def _ranks(best: Prediction) -> str:
    """Returns which ranks are to be on devices of which class: those of a class follow each other."""
    of_class: dict[str, list[int]] = {}
    for number, stage in enumerate(best.stages):
        of_class.setdefault(stage.device, []).append(best.plan.rank_of(number))
    spans = sorted((min(ranks), max(ranks), name) for name, ranks in of_class.items())
    return ", ".join(
        f"{first} to {last} on {name}" if last > first else f"{first} on {name}" for first, last, name in spans
    )


def _hinted(result: SearchResult) -> list[str]:
    """Returns what is where it is because of a hint."""
    by_why: dict[str, list[str]] = {}
    for name, why in result.problem.whys.items():
        by_why.setdefault(why, []).append(name)
    return [f"{', '.join(compress_runs(names))}: {why}" for why, names in by_why.items()]


def _links(best: Prediction) -> list[str]:
    """Returns what each link carries in a step."""
    used = (ends for ends, size in best.link_bytes.items() if size)
    links = sorted(used, key=lambda ends: -best.link_bytes[ends])
    shown = [
        f"rank {source} > {destination} {format_bytes(best.link_bytes[source, destination])}"
        f" ({100 * best.transfer_s[source, destination] / best.step_s:.0f} %)"
        for source, destination in links[:_MOST_LINKS]
    ]
    more = f", and {len(links) - _MOST_LINKS} more" if len(links) > _MOST_LINKS else ""
    return [f"links (share of the step) {', '.join(shown)}{more}"] if shown else []


def explain(result: SearchResult, name: str) -> str:
    """Explains why a module is where it is: its costs, its stage, and the step with the nearest cut on its other side.

    Raises:
        PlanError: There is no such unit.
    """
    best, graph, cluster = result.best, result.problem.graph, result.problem.cluster
    stage = next((number for number, each in enumerate(best.stages) if name in each.nodes), None)
    if stage is None:
        known = ", ".join(f"'{node.name}'" for node in graph.nodes[:6])
        raise PlanError(
            f"the plan has no unit called '{name}'.",
            why=f"its {count_of(len(graph.nodes), 'unit')} are {known}{', ...' if graph.nodes[6:] else '.'}",
            hint=f"--explain {graph.nodes[-1].name}",
        )
    node = next(each for each in graph.nodes if each.name == name)
    own = best.stages[stage]
    again = ", and is computed again in the backward, for memory" if name in own.remat else ""
    times = f"{format_seconds(own.forward_s)} forward and {format_seconds(own.backward_s)} backward"
    why = f", {result.problem.whys[name]}" if name in result.problem.whys else ""
    in_flight = count_of(own.in_flight, "micro-batch")
    lines = [
        f"{name} is on {own.where}, stage {stage}{why}{again}",
        f"  it holds {format_bytes(node.memory_bytes)} and keeps {format_bytes(node.saved_bytes)} of each micro-batch",
        f"  its stage takes {times}, holds {format_bytes(own.memory_bytes)}, {in_flight} in flight",
    ]
    borders = Borders(graph, cluster)
    for other in (stage - 1, stage + 1):
        if not 0 <= other < len(best.stages):
            continue
        pipeline = borders.moved(best.pipeline, name, stage, other)
        if pipeline is None:
            obstacle = borders.obstacle(best.pipeline, name, stage, other)
            lines.append(f"  it cannot join {best.stages[other].where}: {obstacle}")
            continue
        found = predict_step(graph, cluster, pipeline, best.num_micro_batches)
        peak = found.stages[other].memory_bytes
        fits = "" if peak <= found.stages[other].limit_bytes else f", and {format_bytes(peak)} do not fit there"
        lines.append(f"  with {best.stages[other].where} the step would take {format_seconds(found.step_s)}{fits}")
    return "\n".join(lines)

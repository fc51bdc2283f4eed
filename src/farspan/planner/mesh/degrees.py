"""How many ranks best run each layer together: stages that wait for each other, against sums on the way.

    k ranks run each layer, N / k stages    step(k) = pipeline of N / k stages, simulated
    a stage's forward                       its work / k + what its k ranks exchange of each block's results

More ranks in a stage wait less for other stages, exchange more, and divide what the fullest stage holds; fewer have
longer pipelines, which must have as many parts. What a rank cannot hold is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farspan.errors import PlanError
from farspan.planner.links import Link
from farspan.planner.mesh.chain_step import ChainStage, chain_step
from farspan.planner.mesh.groups import COPIES, FLOPS, LATENCY_S, POSITIONS, Machine, cut_evenly
from farspan.planner.model_unit import Unit
from farspan.units import count_of, format_bytes

__all__ = ["DegreeForecast", "best_degree"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeForecast:
    """A number of ranks that run each layer together.

    Attributes:
        degree: How many.
        num_stages: Of so many ranks each.
        step_s: Simulated seconds of a step.
        held_bytes: What the fullest rank holds of parameters, gradients and optimizer state.
    """

    degree: int
    num_stages: int
    step_s: float
    held_bytes: float


def best_degree(
    units: Sequence[Unit],
    num_ranks: int,
    machine: Machine,
    *,
    num_micro_batches: int,
    num_sums: int,
    summed_bytes: float,
) -> DegreeForecast:
    """Choose the number of ranks for each layer whose step is the shortest.

    Args:
        units: Of the model, in the order in which they run.
        num_ranks: To be divided into stages.
        machine: What a rank has.
        num_micro_batches: Of a batch.
        num_sums: How many results the ranks of a stage add up in one forward of the whole model.
        summed_bytes: The size of one for a single position.

    Raises:
        PlanError: No number fits.

    Example:
        >>> units = [Unit(name=str(i), cost=1e6, parameter_bytes=4_000_000) for i in range(4)]
        >>> fast = Machine(memory_bytes=1e9, flops_per_s=1e10, bytes_per_s=1e10)
        >>> best_degree(units, 2, fast, num_micro_batches=1, num_sums=8, summed_bytes=1e3).degree
        2
        >>> slow = Machine(memory_bytes=1e9, flops_per_s=1e10, bytes_per_s=1e7)
        >>> best_degree(units, 2, slow, num_micro_batches=1, num_sums=8, summed_bytes=1e3).degree
        1
    """
    found: list[DegreeForecast] = []
    least = 0.0
    total = sum(unit.cost for unit in units) or 1.0
    for degree in range(1, num_ranks + 1):
        num_stages = num_ranks // degree
        if num_ranks % degree or len(units) < num_stages:
            continue
        costs, sizes = cut_evenly(units, num_stages)
        held = COPIES * max(sizes) / degree
        least = held if not least else min(least, held)
        if held > machine.memory_bytes:
            continue
        positions = POSITIONS / num_micro_batches
        stages: list[ChainStage] = []
        for cost in costs:
            sums = num_sums * cost / total
            exchanged_s = sums * (degree - 1) * (positions * summed_bytes / machine.bytes_per_s + LATENCY_S)
            work_s = FLOPS * cost * positions / machine.flops_per_s / degree
            stages.append(ChainStage(forward_s=work_s + exchanged_s, backward_s=2 * work_s + exchanged_s))
        step_s = chain_step(stages, num_micro_batches, link=Link(name="", latency=LATENCY_S)).step_time
        found.append(DegreeForecast(degree=degree, num_stages=num_stages, step_s=step_s, held_bytes=held))
    if not found:
        raise PlanError(
            f"no number of ranks for each layer fits {count_of(num_ranks, 'rank')}.",
            why=f"parameters, gradients and optimizer state take {format_bytes(least)} at least on a rank that has "
            f"{format_bytes(machine.memory_bytes)}.",
            hint="more ranks, or data_parallel=1",
        )
    return min(found, key=lambda each: (each.step_s, each.degree))

"""Into how many groups ranks are best divided: pipelines that wait, against gradients that are averaged.

    k groups of N / k stages        step(k) = pipeline of N / k stages, simulated; gradients go out beside the backward
    rows a second                   k / step(k)

More groups wait less; each of their ranks holds more, and sends as much as it holds. What a rank cannot hold is left
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farspan.errors import PlanError
from farspan.planner.links import Link
from farspan.planner.mesh.chain_step import ChainStage, chain_step
from farspan.planner.model_unit import Unit
from farspan.planner.partition import partition
from farspan.units import count_of, format_bytes

__all__ = ["COPIES", "FLOPS", "LATENCY_S", "POSITIONS", "GroupsForecast", "Machine", "best_groups", "cut_evenly"]

COPIES = 4
"""Of a parameter that is trained: itself, its gradient, and what Adam keeps."""
POSITIONS = 4096
"""That a batch is taken to have, for none has been seen: a unit's cost is multiply-adds for each of them."""
FLOPS = 2.0
LATENCY_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a rank is taken to have, where nothing has been measured.

    Attributes:
        memory_bytes: Its memory.
        flops_per_s: Its speed.
        bytes_per_s: Of the link to others.
    """

    memory_bytes: float
    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsForecast:
    """A number of groups.

    Attributes:
        num_groups: How many.
        step_s: Simulated seconds of a step.
        held_bytes: What the fullest rank holds of parameters, gradients and optimizer state.
    """

    num_groups: int
    step_s: float
    held_bytes: float

    @property
    def batches_per_s(self) -> float:
        """Returns the batches a second of all groups together."""
        return self.num_groups / self.step_s


def best_groups(
    units: Sequence[Unit],
    num_ranks: int,
    machine: Machine,
    *,
    num_micro_batches: int,
) -> GroupsForecast:
    """Choose the number of groups that trains most batches a second.

    Args:
        units: Of the model, in the order in which they run.
        num_ranks: To be divided.
        machine: What a rank has; its link is that between groups.
        num_micro_batches: Of a batch.

    Raises:
        PlanError: No number fits.

    Example:
        >>> units = [Unit(name=str(i), cost=1e6, parameter_bytes=4_000_000) for i in range(4)]
        >>> roomy = Machine(memory_bytes=1e9, flops_per_s=1e10, bytes_per_s=1e9)
        >>> best_groups(units, 4, roomy, num_micro_batches=1).num_groups
        4
        >>> small = Machine(memory_bytes=4e7, flops_per_s=1e10, bytes_per_s=1e9)
        >>> best_groups(units, 4, small, num_micro_batches=1).num_groups
        2
    """
    found: list[GroupsForecast] = []
    least = 0.0
    for num_groups in range(1, num_ranks + 1):
        num_stages = num_ranks // num_groups
        if num_ranks % num_groups or len(units) < num_stages:
            continue
        costs, sizes = cut_evenly(units, num_stages)
        held = COPIES * max(sizes)
        least = held if not least else min(least, held)
        if held > machine.memory_bytes:
            continue
        forward_s = [FLOPS * cost * POSITIONS / machine.flops_per_s / num_micro_batches for cost in costs]
        stages = [ChainStage(forward_s=seconds, backward_s=2 * seconds) for seconds in forward_s]
        link = Link(name="", latency=LATENCY_S)
        step_s = chain_step(stages, num_micro_batches, link=link).step_time
        if num_groups > 1:  # an all-reduce, which begins with the backward and is hidden by nothing but that
            reduction_s = 2 * (num_groups - 1) / num_groups * max(sizes) / machine.bytes_per_s
            step_s = max(step_s, max(forward_s) * num_micro_batches + reduction_s)
        found.append(GroupsForecast(num_groups=num_groups, step_s=max(step_s, 1e-12), held_bytes=held))
    if not found:
        raise PlanError(
            f"no number of groups fits {count_of(num_ranks, 'rank')}.",
            why=f"parameters, gradients and optimizer state take {format_bytes(least)} at least on a rank that has "
            f"{format_bytes(machine.memory_bytes)},\nor the model has fewer parts than a group has ranks.",
            hint="more ranks, or data_parallel=1 with a plan of your own",
        )
    return max(found, key=lambda each: (each.batches_per_s, -each.num_groups))


def cut_evenly(units: Sequence[Unit], num_stages: int) -> tuple[list[float], list[float]]:
    """Cuts units into stages of equal cost; returns the cost and the parameter bytes of each."""
    stage_of = partition([unit.cost for unit in units], num_stages) if num_stages > 1 else [0] * len(units)
    costs, sizes = [0.0] * num_stages, [0.0] * num_stages
    for unit, stage in zip(units, stage_of, strict=True):
        costs[stage] += unit.cost
        sizes[stage] += unit.parameter_bytes
    return costs, sizes

"""Into how many micro-batches a batch is best cut: waiting at the ends of the step against what each of them costs.

    m micro-batches over stages that take b_1, b_2, ..     step(m), simulated
    each takes seconds(m), more than b / m:                 an operation takes something however small it is, and a task
                                                            has to be begun, and its values sent

Of numbers whose steps are about as short the first is taken that divides the batch evenly, else the smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farspan.cluster import Speeds
from farspan.planner.links import Link
from farspan.planner.mesh.chain_step import ChainStage, chain_step

__all__ = ["LanesForecast", "best_lanes", "nominal_speeds", "seconds_of_work"]

_MOST_FOR_EACH_RANK, _MOST = 8, 64
_AS_SHORT = 1.05
"""Predictions are off by as much."""
_FORWARD = 1 / 3
"""Of a micro-batch's work."""
_TASK_S = 2e-4
"""What it takes to begin a task, beside its operations: benchmarks/small_steps."""
_LINK = Link(name="", latency=1e-4, bandwidth=1e9)
_NOMINAL = {
    "cpu": Speeds(flops_per_s=6e10, half_flops_per_s=6e10, memory_bytes_per_s=1e10, least_s=5e-6),
    "": Speeds(flops_per_s=4e13, half_flops_per_s=4e14, memory_bytes_per_s=2e12, least_s=1e-5),
}
"""What is reached on one core, and on a GPU. Not measured, for the number of micro-batches has to be the same in each
run of a program, and on all ranks: rounding depends on it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesForecast:
    """The best number of micro-batches.

    Attributes:
        number: How many.
        step_s: Simulated seconds of a step.
        whole_s: The same of a step with the batch as it is.
    """

    number: int
    step_s: float
    whole_s: float

    @property
    def gain(self) -> float:
        """How many times as fast a step is."""
        return self.whole_s / self.step_s if self.step_s else 1.0


def best_lanes(
    seconds_of: Callable[[int], float],
    shares: Sequence[float],
    num_rows: int,
    *,
    widths: Sequence[int] = (),
) -> LanesForecast:
    """Choose the number of micro-batches whose step is the shortest.

    Args:
        seconds_of: Seconds of all work of one of so many micro-batches, forward and backward.
        shares: Of each stage in them.
        num_rows: Of the batch; each micro-batch has two at least.
        widths: How many ranks each stage has; by default one.

    Example:
        >>> best_lanes(lambda number: 1.0 / number, [0.5, 0.5], 64).number
        16
        >>> best_lanes(lambda number: 1e-4, [0.5, 0.5], 64).number
        1
    """
    total = sum(shares) or 1.0
    widths = list(widths) or [1] * len(shares)

    def step_s(number: int) -> float:
        seconds = seconds_of(number)
        return chain_step(
            [
                ChainStage(
                    forward_s=_FORWARD * seconds * share / total + _TASK_S,
                    backward_s=(1 - _FORWARD) * seconds * share / total + _TASK_S,
                    width=width,
                )
                for share, width in zip(shares, widths, strict=True)
            ],
            number,
            link=_LINK,
        ).step_time

    most = min(num_rows // 2, _MOST_FOR_EACH_RANK * sum(widths), _MOST) if sum(widths) > 1 else 1
    steps = {number: step_s(number) for number in _numbers(max(1, most))}
    shortest = min(steps.values())
    near = [number for number, seconds in steps.items() if seconds <= _AS_SHORT * shortest]
    number = 1 if 1 in near else next((each for each in near if num_rows % each == 0), near[0])
    return LanesForecast(number=number, step_s=steps[number], whole_s=steps[1])


def seconds_of_work(work: Sequence[tuple[float, float, float]], device_type: str) -> Callable[[int], float]:
    """Seconds of one of so many micro-batches of a batch.

    Args:
        work: Of each operation for the whole batch the floating-point operations, and the bytes that it moves: those
            of rows, and those of weights, which are moved for each micro-batch.
        device_type: Where it runs, as torch names it ("cpu").
    """
    speeds = nominal_speeds(device_type)

    def seconds_of(number: int) -> float:
        return sum(
            max(
                flops / number / speeds.flops_per_s,
                (rows / number + weights) / speeds.memory_bytes_per_s,
                speeds.least_s,
            )
            for flops, rows, weights in work
        )

    return seconds_of


def nominal_speeds(device_type: str) -> Speeds:
    """Returns what devices of a type, as torch names it ("cpu"), are taken to reach where nothing is measured."""
    return _NOMINAL.get(device_type, _NOMINAL[""])


def _numbers(most: int) -> list[int]:
    """Returns the numbers of lanes that are compared.

    >>> _numbers(20)
    [1, 2, 3, 4, 6, 8, 12, 16]
    """
    powers = [2**power for power in range(most.bit_length())]
    return sorted({*powers, *(3 * power for power in powers if 3 * power <= most)})

"""Emulated devices: layers that sleep for as long as a device would compute, and the tasks of a step made of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from benchmarks.bubble_rates.schedules import Chain, Costs
from torch import Tensor, nn

from farspan.schedule import Kind, Schedule, Task, orders_by_name

__all__ = ["WIDTH", "Model", "Pace", "Sleeper", "as_run", "layers_of", "places"]

WIDTH = 16
_UNEQUAL = (1.0, 1.0, 1.6, 1.0, 0.7, 1.0, 1.3, 1.0)


class _Pause(torch.autograd.Function):
    """The same tensor; its gradient comes so many seconds later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()  # not a view: torch detaches the outputs of a stage in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of one layer: forward, gradient of the input, gradient of the weight."""

    forward: float
    input: float
    weight: float

    def times(self, factor: float) -> Pace:
        return Pace(forward=self.forward * factor, input=self.input * factor, weight=self.weight * factor)


class Sleeper(nn.Module):
    """A linear layer that takes its time: all gradients of its weight come through one node of their own."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self.pace = pace
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.01 * torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pace.forward)
        weight: Any = _Pause.apply(self.weight, self.pace.weight)
        return _Pause.apply(x @ weight, self.pace.input)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Layers one after another."""

    def __init__(self, paces: Sequence[Pace]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Sleeper(pace) for pace in paces])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def places(shape: str, num_ranks: int) -> list[int]:
    """The rank of each stage: one stage on each, two round the ranks, or two down and back up."""
    down = list(range(num_ranks))
    return {"straight": down, "looped": down * 2, "vee": down + down[::-1]}[shape]


def layers_of(num_ranks: int, unit_s: float, *, is_equal: bool) -> list[Pace]:
    """Two layers for each rank, of `unit_s` each; or of 0.7 to 1.6 times that."""
    one = Pace(forward=unit_s, input=unit_s, weight=unit_s)
    return [one if is_equal else one.times(_UNEQUAL[number % len(_UNEQUAL)]) for number in range(2 * num_ranks)]


def as_run(
    name: str, ranks: Sequence[int], paces: Sequence[Pace], num_micro_batches: int, *, run_ahead: int
) -> Schedule:
    """The schedule that farspan runs, with the durations there are: what `planner.simulate` plays.

    Args:
        name: Of the schedule.
        ranks: Of each stage.
        paces: Of all layers, in order; each stage has as many.
        num_micro_batches: In a step.
        run_ahead: How many micro-batches more than needed are in flight.
    """
    per_stage = len(paces) // len(ranks)
    is_split = name == "zero-bubble"
    costs: list[Costs] = []
    for stage in range(len(ranks)):
        own = paces[stage * per_stage : (stage + 1) * per_stage]
        weight = sum(pace.weight for pace in own)
        costs.append(
            Costs(
                forward=sum(pace.forward for pace in own),
                backward=sum(pace.input for pace in own) + (0.0 if is_split else weight),
                weight=weight if is_split else 0.0,
            )
        )
    chain = Chain(ranks=tuple(ranks), costs=tuple(costs), num_micro_batches=num_micro_batches)
    tasks = _first_stage_whole(chain) if is_split else chain.tasks
    nominal = tuple(replace(task, duration=_nominal(task, is_split)) for task in tasks)
    orders = orders_by_name(name, nominal, chain.num_ranks, run_ahead=run_ahead)
    return Schedule(tasks=tasks, orders=tuple(map(tuple, orders)))


def _first_stage_whole(chain: Chain) -> tuple[Task, ...]:
    """Nobody waits for the first stage: its backward is one task, and there is no other for its weight gradients."""
    kept = [index for index, task in enumerate(chain.tasks) if task.kind is not Kind.WEIGHT or task.level > 0]
    numbers = {index: number for number, index in enumerate(kept)}
    tasks: list[Task] = []
    for index in kept:
        task = replace(chain.tasks[index], needs=tuple(numbers[need] for need in chain.tasks[index].needs))
        if task.kind is Kind.BACKWARD and task.level == 0:
            task = replace(task, duration=task.duration + chain.costs[0].weight, memory=-1.0)
        tasks.append(task)
    return tuple(tasks)


def _nominal(task: Task, is_split: bool) -> float:
    is_whole = task.kind is Kind.BACKWARD and (not is_split or task.level == 0)
    return 2.0 if is_whole else 1.0

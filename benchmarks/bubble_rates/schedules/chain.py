"""A plain pipeline: every micro-batch goes through the same stages, forward and then back.

straight     stage 0 1 2        on rank 0 1 2
looped       stage 0 1 2 3 4 5  on rank 0 1 2 0 1 2
vee          stage 0 1 2 3 4 5  on rank 0 1 2 2 1 0
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from farspan.schedule.task import Kind, Task

__all__ = ["Chain", "Costs", "looped", "straight", "vee"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one stage costs for one micro-batch.

    Attributes:
        forward: Time of the forward.
        backward: Time of the backward, without what is deferred.
        weight: Time of the weight gradients as a task of their own; 0 if the backward includes them.
        memory: What the forward keeps.
        weight_memory: How much of that the weight gradients still need.
        output_bytes: Size of the activations that go to the next stage.
        gradient_bytes: Size of the gradients that go to the stage before.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 0.0
    memory: float = 1.0
    weight_memory: float = 1.0
    output_bytes: float = 0.0
    gradient_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Stages one after another, and the tasks of a step on them.

    Attributes:
        ranks: Where each stage lies.
        costs: Of each stage.
        num_micro_batches: How many go through.
    """

    ranks: tuple[int, ...]
    costs: tuple[Costs, ...]
    num_micro_batches: int

    @property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @cached_property
    def is_split(self) -> bool:
        """Whether weight gradients are tasks of their own."""
        return any(costs.weight for costs in self.costs)

    def stages_of(self, rank: int) -> list[int]:
        """The stages on a rank, first to last."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]

    def index(self, kind: Kind, stage: int, micro_batch: int) -> int:
        """Where a task stands in `tasks`."""
        block = list(Kind).index(kind)
        place = self.num_stages - 1 - stage if kind is Kind.BACKWARD else stage
        return (block * self.num_micro_batches + micro_batch) * self.num_stages + place

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All forwards, all backwards, then all weight gradients, which add up in the order of micro-batches."""
        stages, numbers = range(self.num_stages), range(self.num_micro_batches)
        tasks = [self._forward(stage, number) for number in numbers for stage in stages]
        tasks += [self._backward(stage, number) for number in numbers for stage in reversed(stages)]
        if self.is_split:
            tasks += [self._weight(stage, number) for number in numbers for stage in stages]
        return tuple(tasks)

    def _forward(self, stage: int, micro_batch: int) -> Task:
        costs = self.costs[stage]
        return Task(
            kind=Kind.FORWARD,
            rank=self.ranks[stage],
            micro_batch=micro_batch,
            level=stage,
            duration=costs.forward,
            needs=(self.index(Kind.FORWARD, stage - 1, micro_batch),) if stage else (),
            holds=True,
            memory=costs.memory,
            output_bytes=self._to(stage + 1, costs.output_bytes),
        )

    def _backward(self, stage: int, micro_batch: int) -> Task:
        costs = self.costs[stage]
        own = self.index(Kind.FORWARD, stage, micro_batch)
        is_last = stage == self.num_stages - 1
        return Task(
            kind=Kind.BACKWARD,
            rank=self.ranks[stage],
            micro_batch=micro_batch,
            level=stage,
            duration=costs.backward,
            needs=(own,) if is_last else (own, self.index(Kind.BACKWARD, stage + 1, micro_batch)),
            holds=False,
            memory=-costs.memory + (costs.weight_memory if self.is_split else 0.0),
            output_bytes=self._to(stage - 1, costs.gradient_bytes),
        )

    def _to(self, stage: int, size_bytes: float) -> tuple[tuple[int, float], ...]:
        """A message of that size to the rank of another stage, if there is one."""
        return ((self.ranks[stage], size_bytes),) if size_bytes and 0 <= stage < self.num_stages else ()

    def _weight(self, stage: int, micro_batch: int) -> Task:
        own = self.index(Kind.BACKWARD, stage, micro_batch)
        before = (self.index(Kind.WEIGHT, stage, micro_batch - 1),) if micro_batch else ()
        return Task(
            kind=Kind.WEIGHT,
            rank=self.ranks[stage],
            micro_batch=micro_batch,
            level=stage,
            duration=self.costs[stage].weight,
            needs=(own, *before),
            holds=False,
            memory=-self.costs[stage].weight_memory,
        )


def straight(num_ranks: int, num_micro_batches: int, costs: Costs | None = None) -> Chain:
    """One stage on each rank, all alike."""
    return _alike(range(num_ranks), num_micro_batches, costs)


def looped(num_ranks: int, num_rounds: int, num_micro_batches: int, costs: Costs | None = None) -> Chain:
    """Several times around all ranks: `num_rounds` stages on each."""
    return _alike([*range(num_ranks)] * num_rounds, num_micro_batches, costs)


def vee(num_ranks: int, num_micro_batches: int, costs: Costs | None = None) -> Chain:
    """Down the ranks and back up: the first rank has the last stage too."""
    return _alike([*range(num_ranks), *reversed(range(num_ranks))], num_micro_batches, costs)


def _alike(ranks: Iterable[int], num_micro_batches: int, costs: Costs | None) -> Chain:
    places = tuple(ranks)
    return Chain(ranks=places, costs=(costs or Costs(),) * len(places), num_micro_batches=num_micro_batches)

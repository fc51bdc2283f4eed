"""Simulates a step of a chain of stages, of which each has one rank or several, in the orders of the runtime.

stage 0   2 ranks   F0    F2    ..          what a stage passes on goes to the next one; each micro-batch is run
                       F1    F3 ..          by one of the stage's ranks, in turn
stage 1   1 rank       F0 B0 F1 B1 ..
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from farspan.planner.links import Link, own_links
from farspan.planner.simulate import simulate
from farspan.planner.simulation import Simulation
from farspan.program.tasks import BackwardWork, ForwardWork, StepWork, scheduled
from farspan.schedule import Kind, Schedule

__all__ = ["ChainStage", "chain_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStage:
    """A stage of a row.

    Attributes:
        forward_s: Seconds of one micro-batch's forward.
        backward_s: The same of its backward.
        width: How many ranks take its micro-batches in turn.
        sent_bytes: What it passes on to the next stage for each micro-batch.
    """

    forward_s: float
    backward_s: float
    width: int = 1
    sent_bytes: float = 0.0


def chain_step(stages: Sequence[ChainStage], num_micro_batches: int, *, link: Link | None = None) -> Simulation:
    """Simulate a step, in the orders of 1F1B.

    Args:
        stages: In order; ranks are counted stage by stage.
        num_micro_batches: Of the step.
        link: Between each two ranks; by default messages take no time.

    Example:
        >>> one = ChainStage(forward_s=1.0, backward_s=2.0)
        >>> chain_step([one, one], 4).step_time
        15.0
        >>> slow = ChainStage(forward_s=2.0, backward_s=4.0, width=2)
        >>> chain_step([slow, one], 8).step_time < chain_step([replace(slow, width=1), one], 8).step_time
        True
    """
    first = [0, *accumulate(stage.width for stage in stages)]
    forwards: list[ForwardWork] = []
    backwards: list[BackwardWork] = []
    last = len(stages) - 1
    for number in range(num_micro_batches):
        ranks = [first[place] + number % stage.width for place, stage in enumerate(stages)]
        begin = len(forwards)
        for place, stage in enumerate(stages):
            uses = (begin + place - 1,) if place else ()
            forwards.append(
                ForwardWork(ranks[place], number, place, uses, (), holds=True, keeps=True, width=stage.width)
            )
        for place in range(last, -1, -1):
            uses = (len(backwards) - 1,) if place < last else ()
            backwards.append(
                BackwardWork(
                    rank=ranks[place],
                    micro_batch=number,
                    level=place,
                    forward=begin + place,
                    uses=uses,
                    accumulates=(ranks[place],),
                    frees=True,
                    is_worth_splitting=False,
                    feeds_another_rank=place > 0,
                    width=stages[place].width,
                )
            )
    found = scheduled(StepWork(tuple(forwards), tuple(backwards)), "1f1b", first[-1], 0)
    tasks = tuple(
        replace(
            task,
            duration=stages[task.level].forward_s if task.kind is Kind.FORWARD else stages[task.level].backward_s,
            output_bytes=_sent(stages, first, task.level, task.micro_batch, is_forward=task.kind is Kind.FORWARD),
        )
        for task in found.schedule.tasks
    )
    route = own_links() if link is None else own_links(latency=link.latency, bandwidth=link.bandwidth)
    return simulate(Schedule(tasks=tasks, orders=found.schedule.orders), link_of=route)


def _sent(
    stages: Sequence[ChainStage], first: Sequence[int], place: int, micro_batch: int, *, is_forward: bool
) -> tuple[tuple[int, float], ...]:
    """Returns what a task sends: values to the next stage, their gradients to the one before."""
    to = place + 1 if is_forward else place - 1
    if not 0 <= to < len(stages):
        return ()
    return ((first[to] + micro_batch % stages[to].width, stages[min(place, to)].sent_bytes),)

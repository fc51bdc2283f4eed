"""Costs set right by a step that has run: each stage's nodes as much slower, or faster, as their stage was.

node          costs     its stage predicted, measured          recalibrated
blocks.3      10 ms     40 ms        50 ms                     12.5 ms

What makes a stage slower than predicted, its nodes or its device, cannot be seen in one step: it is laid on the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from farspan.cluster import Cluster
from farspan.plan.hints import Hints
from farspan.planner.cost_model import CostedGraph, Seconds
from farspan.planner.optimize.best_plan import SearchResult, best_plan
from farspan.planner.prediction import Prediction, predict_step

__all__ = ["Recalibration", "StageSeconds", "recalibrate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds that a stage has taken for each micro-batch.

    Attributes:
        forward_s: In the forward.
        backward_s: In the backward.
    """

    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalibration:
    """A plan's costs, corrected by a measured step that ran under it.

    Attributes:
        graph: With the costs set right.
        factors: By stage, how much longer its work took than predicted.
        ran: That plan, with these.
        result: What is found with these.
        measured_s: The step.
    """

    graph: CostedGraph
    factors: tuple[float, ...]
    ran: Prediction
    result: SearchResult
    measured_s: float

    @property
    def error(self) -> float:
        """Returns how far the prediction is from the measured step even so, as a share of it."""
        return abs(self.ran.step_s / self.measured_s - 1)

    @property
    def gain(self) -> float:
        """Returns how much shorter the step of the best plan is predicted to be, as a share."""
        return 1 - self.result.best.step_s / self.ran.step_s

    @property
    def is_worth_it(self) -> bool:
        """Returns whether the gain is more than the error."""
        return self.gain > self.error


def recalibrate(
    graph: CostedGraph,
    cluster: Cluster,
    ran: Prediction,
    seconds: Sequence[StageSeconds],
    measured_s: float,
    *,
    hints: Hints | None = None,
) -> Recalibration:
    """Look for a better plan with the costs that a step has shown.

    Args:
        graph: With the costs that `ran` was predicted from.
        cluster: Where it ran.
        ran: The plan.
        seconds: By stage, what it took.
        measured_s: Of the whole step.
        hints: What `ran` was found with, and the better plan is to keep too.
    """
    of_node: dict[str, tuple[float, float]] = {}
    for stage, taken in zip(ran.stages, seconds, strict=True):
        factors = (_ratio(taken.forward_s, stage.forward_s), _ratio(taken.backward_s, stage.backward_s))
        of_node.update(dict.fromkeys(stage.nodes, factors))
    nodes = tuple(
        replace(
            node,
            forward_s=_times(node.forward_s, forward),
            backward_s=_times(node.backward_s, backward),
            options=tuple(
                replace(
                    option,
                    forward_s=_times(option.forward_s, forward),
                    backward_s=_times(option.backward_s, backward),
                )
                for option in node.options
            ),
        )
        for node, (forward, backward) in ((node, of_node[node.name]) for node in graph.nodes)
    )
    right = replace(graph, nodes=nodes)
    result = best_plan(right, cluster, ran.num_micro_batches, hints=hints)
    return Recalibration(
        graph=right,
        factors=tuple(
            _ratio(taken.forward_s + taken.backward_s, stage.forward_s + stage.backward_s)
            for stage, taken in zip(ran.stages, seconds, strict=True)
        ),
        ran=predict_step(result.problem.graph, result.problem.cluster, ran.pipeline, ran.num_micro_batches),
        result=result,
        measured_s=measured_s,
    )


def _ratio(measured: float, predicted: float) -> float:
    return measured / predicted if predicted else 1.0


def _times(seconds: Seconds, factor: float) -> Seconds:
    if isinstance(seconds, Mapping):
        return {kind: value * factor for kind, value in seconds.items()}
    return seconds * factor

"""Finds the best plan with wide stages: fewer stages than devices, of which slow ones have several.

    for each number of stages      cuts and widths whose slowest stage is as fast as can be, simulated as they run

What is simulated decides, by the same simulation as for plans without width: it counts that values go out to the
members of a stage, and that gradients come home. Searches and simulations end after so much work, never after so long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from farspan.cluster import Cluster, DeviceClass
from farspan.planner.cost_model import CostedGraph, CostedNode
from farspan.planner.cost_model.colocation import seconds_on
from farspan.planner.mesh.widths import cuts_and_widths
from farspan.planner.pipeline import Pipeline, PipelineStage
from farspan.planner.prediction import Prediction, predict_step

__all__ = ["best_wide"]

_MOST_WORK = 4e6
"""Elementary steps of all searches for cuts and widths; some 2 s."""
_MOST_TASKS = 100_000
"""Tasks of all steps that are simulated; some 2 s."""


def best_wide(
    graph: CostedGraph, cluster: Cluster, num_micro_batches: int, *, reduction: str | None = None
) -> Prediction | None:
    """Returns the best plan with wide stages that fits; None where there is none, or devices are of several classes.

    Args:
        graph: Its nodes are modules or parameters of the model.
        cluster: Its devices are all used.
        num_micro_batches: Of a step.
        reduction: How gradients are added up, as for `predict_step`.
    """
    kinds = list(cluster.classes)
    if len(kinds) != 1 or num_micro_batches < 2:
        return None
    kind = kinds[0]
    blocks = _blocks(graph)
    costs = [sum(seconds_on(node, kind) for node in block) for block in blocks]
    if not all(map(math.isfinite, costs)):
        return None
    best: Prediction | None = None
    num_tasks = 0
    for pipeline in _pipelines(blocks, costs, kind, cluster.num_devices):
        num_tasks += 8 * len(pipeline.stages) * num_micro_batches + len(graph.nodes)
        if num_tasks > _MOST_TASKS:
            break
        found = predict_step(graph, cluster, pipeline, num_micro_batches, reduction=reduction)
        if found.fits and (best is None or found.step_s < best.step_s):
            best = found
    return best


def _pipelines(
    blocks: Sequence[Sequence[CostedNode]], costs: Sequence[float], kind: DeviceClass, num_devices: int
) -> Iterator[Pipeline]:
    """Yields the best cuts and widths for each number of stages, the most stages first."""
    work = 0.0
    for num_stages in range(min(num_devices - 1, len(blocks)), 0, -1):
        work += num_stages * (len(blocks) * num_devices) ** 2 / 4
        if work > _MOST_WORK:
            continue  # fewer stages may be less work
        stage_of, widths = cuts_and_widths(costs, num_stages, num_devices)
        nodes: list[list[str]] = [[] for _ in widths]
        for block, stage in zip(blocks, stage_of, strict=True):
            nodes[stage] += [node.name for node in block]
        yield Pipeline(
            stages=tuple(
                PipelineStage(device_class=kind.name, replicas=width, nodes=tuple(names))
                for width, names in zip(widths, nodes, strict=True)
            )
        )


def _blocks(graph: CostedGraph) -> list[list[CostedNode]]:
    """Returns the nodes, in their order, cut wherever that parts no group that has to stay together."""
    last: dict[str, int] = {}
    for place, node in enumerate(graph.nodes):
        if node.together is not None:
            last[node.together] = place
    blocks: list[list[CostedNode]] = []
    end = 0
    for place, node in enumerate(graph.nodes):
        if place >= end:
            blocks.append([])
        blocks[-1].append(node)
        end = max(end, place + 1, last.get(node.together or "", -1) + 1)
    return blocks

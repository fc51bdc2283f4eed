"""Steps under plans that were not found by the search."""

from __future__ import annotations

from collections.abc import Sequence

from farspan.cluster import Cluster
from farspan.planner.cost_model import CostedGraph
from farspan.planner.pipeline import Pipeline, PipelineStage
from farspan.planner.prediction import Prediction, predict_step


def predict_stages(
    graph: CostedGraph, cluster: Cluster, stages: Sequence[tuple[str, Sequence[str]]], num_micro_batches: int
) -> Prediction:
    """The step of given stages, each on one device: in order, the class of the device and the names of the nodes."""
    given = tuple(PipelineStage(device_class=name, nodes=tuple(nodes)) for name, nodes in stages)
    return predict_step(graph, cluster, Pipeline(stages=given), num_micro_batches)

"""What a step will be like under a plan that somebody else has made."""

from __future__ import annotations

from collections.abc import Sequence

from farspan.cluster import Cluster
from farspan.planner.costed import CostedGraph
from farspan.planner.forecast.forecast import Forecast, forecast
from farspan.planner.pipeline import Pipeline, PipelineStage

__all__ = ["forecast_of_stages"]


def forecast_of_stages(
    graph: CostedGraph, cluster: Cluster, stages: Sequence[tuple[str, Sequence[str]]], num_micro_batches: int
) -> Forecast:
    """Play a step of given stages, each on one device.

    Args:
        graph: Its nodes are modules or parameters of the model.
        cluster: Where it runs.
        stages: In order, the class of the device and the names of the nodes; together all nodes.
        num_micro_batches: Of a step.
    """
    pipeline = Pipeline(
        objective="step-time",
        stages=tuple(
            PipelineStage(
                device_class=device_class,
                replicas=1,
                tensor_parallel=1,
                nodes=tuple(nodes),
                options={},
                once_s=0.0,
                rate_s=0.0,
                drain_s=0.0,
                memory_bytes=0.0,
                in_flight=0,
            )
            for device_class, nodes in stages
        ),
        value=0.0,
        bound=0.0,
        search_s=0.0,
    )
    return forecast(graph, cluster, pipeline, num_micro_batches)

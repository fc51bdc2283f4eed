"""A stage of a pipeline, as the search has found it or a plan gives it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["PipelineStage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """A stage of a pipeline; one that is given and not searched for has no seconds, bytes and micro-batches.

    Attributes:
        device_class: Name of the class of its devices.
        replicas: Data-parallel degree.
        tensor_parallel: Devices of each replica.
        nodes: Names.
        options: Name of a node: the option it runs with, where that is not as it is given.
        once_s: Seconds of one micro-batch.
        rate_s: Seconds for each micro-batch, steadily.
        drain_s: Seconds from the end of the first micro-batch to the end of the step.
        memory_bytes: Of each device.
        in_flight: Micro-batches in each replica.
    """

    device_class: str
    replicas: int = 1
    tensor_parallel: int = 1
    nodes: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict[str, str])
    once_s: float = 0.0
    rate_s: float = 0.0
    drain_s: float = 0.0
    memory_bytes: float = 0.0
    in_flight: int = 0

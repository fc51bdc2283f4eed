"""One stage of a pipeline that has been found."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PipelineStage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """One stage of a pipeline.

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
    replicas: int
    tensor_parallel: int
    nodes: tuple[str, ...]
    options: dict[str, str]
    once_s: float
    rate_s: float
    drain_s: float
    memory_bytes: float
    in_flight: int

"""The ways in which a node can run on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from farspan.cluster import DeviceClass
from farspan.planner.cost_model.colocation import seconds_on
from farspan.planner.cost_model.costed_graph import CostedNode

__all__ = ["Choice", "choices_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to run a node: seconds, and bytes for each micro-batch in flight and besides; no name: as it is given."""

    name: str
    time_s: float
    saved_bytes: float
    memory_bytes: float

    def memory(self, in_flight: int) -> float:
        return self.saved_bytes * in_flight + self.memory_bytes


def choices_of(node: CostedNode, kind: DeviceClass, degree: int) -> list[Choice]:
    """Returns how a node can run on that class at that degree; as it is given is a choice of degree 1."""
    found: list[Choice] = []
    if degree == 1:
        found.append(
            Choice(
                name="",
                time_s=seconds_on(node, kind),
                saved_bytes=node.saved_bytes,
                memory_bytes=node.memory_bytes,
            )
        )
    for option in node.options:
        if option.tensor_parallel == degree:
            seconds = seconds_on(replace(node, forward_s=option.forward_s, backward_s=option.backward_s), kind)
            found.append(
                Choice(
                    name=option.name,
                    time_s=seconds,
                    saved_bytes=option.saved_bytes,
                    memory_bytes=option.memory_bytes,
                )
            )
    return [choice for choice in found if math.isfinite(choice.time_s)]

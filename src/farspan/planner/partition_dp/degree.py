"""The costs of all nodes of a graph at one tensor-parallel degree on one class of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from farspan.cluster import DeviceClass
from farspan.planner.cost_model.costed_graph import CostedGraph, CostedNode
from farspan.planner.partition_dp.remat import Steps, choices_of, make_steps

__all__ = ["Degree", "of_degree"]


class Degree:
    """Costs of the nodes at one degree on one class, as sums over prefixes.

    Args:
        graph: The nodes.
        group_of: [node] its group.
        members: [prefix, group].
        kind: The class.
        degree: How many devices each node is split over.
        counts_working: Whether memory is needed for what nodes need while they run.
    """

    def __init__(
        self,
        graph: CostedGraph,
        group_of: Sequence[int],
        members: NDArray[np.bool_],
        kind: DeviceClass,
        degree: int,
        *,
        counts_working: bool,
    ) -> None:
        self.kind = kind
        self.degree = degree
        self.only_with: int | None = None
        """The group that a stage on this class has; None for any."""
        self.choices = [choices_of(node, kind, degree) for node in graph.nodes]
        self.fastest = [
            min(range(len(each)), key=lambda index, each=each: (each[index].time_s, each[index].memory(1)))
            if each
            else -1
            for each in self.choices
        ]
        self.group_of = group_of
        self._members = members
        self._steps: Steps | None = None
        num_groups = members.shape[1]
        time_s, saved, memory, refused, parameters = (np.zeros(num_groups) for _ in range(5))
        self.working = np.zeros(num_groups)
        """[group] what one of its nodes needs at most while it runs."""
        index_of = {node.name: index for index, node in enumerate(graph.nodes)}
        self.border: list[tuple[int, int, float]] = []
        for index, (node, group) in enumerate(zip(graph.nodes, group_of, strict=True)):
            if not self.choices[index]:
                refused[group] += 1
                continue
            choice = self.choices[index][self.fastest[index]]
            time_s[group] += choice.time_s
            saved[group] += choice.saved_bytes
            memory[group] += choice.memory_bytes
            if counts_working:
                self.working[group] = max(self.working[group], node.working_bytes)
            sizes, borders = of_degree(node, degree)
            parameters[group] += sizes
            self.border += [
                (group, group_of[index_of[name]], size) for name, size in borders.items() if name in index_of and size
            ]
        self.time_s, self.saved, self.memory = members @ time_s, members @ saved, members @ memory
        self.refused, self.parameters = members @ refused, members @ parameters

    def steps_for(self, flights: Sequence[int]) -> Steps:
        """Returns the steps for those numbers of micro-batches in flight."""
        if self._steps is None:
            self._steps = make_steps(self.choices, self.group_of, self.fastest, flights, self._members)
        return self._steps


def of_degree(node: CostedNode, degree: int) -> tuple[float, Mapping[str, float]]:
    """Parameter bytes of a device, and border bytes, at that degree: the options of one degree differ in remat only."""
    for option in node.options:
        if option.tensor_parallel == degree and degree > 1:
            return option.parameter_bytes, option.border_bytes
    borders = [option.border_bytes for option in node.options if option.tensor_parallel == degree]
    return node.parameter_bytes, borders[0] if borders else {}

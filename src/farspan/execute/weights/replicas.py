"""The parameters that this rank needs for its wide stages and does not own, as they are until the next change.

    optimizer.step()    flush        flush    optimizer.step()    flush
    w changes           w arrives    w        w changes           w arrives

All ranks know which member has what: what changes parameters is recorded, or an optimizer's step, on every rank alike.
Slices (of split stages) are released as they have been used where an optimizer is likely to come next: when the last
gradients are there, the first slices are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from farspan.call.leaf import Placed
from farspan.errors import RecordError
from farspan.graph import Graph, Segment, SliceName, Value, whole_name
from farspan.plan import Worker
from farspan.program.program import Program

__all__ = ["Replicas", "writes_parameters"]


class Replicas:
    """One rank's copies of other ranks' parameters, and what it knows of the copies of others."""

    def __init__(self, parameters: Mapping[str, Placed]) -> None:
        self.parameters = parameters
        self.known: frozenset[tuple[str, Worker]] = frozenset()
        """The parameters that members have as they are now, on all ranks."""
        self.tensors: dict[tuple[str, str], torch.Tensor] = {}
        """This rank's own copies, by name and device."""
        self.on_end: Callable[[], None] | None = None
        """Called when the step that runs is over."""
        self._ends_window = False
        """Whether parameters are likely to change after the step that runs."""
        self._versions: dict[str, int] = {}
        """Versions of this rank's parameters that others have."""

    def forget(self) -> None:
        """Parameters may have changed."""
        self.known = frozenset()
        self.tensors.clear()
        self._versions.clear()

    def put(self, value: Value, device: str) -> None:
        """A parameter has come to a worker of this rank."""
        if not self.is_brief(value):
            self.tensors[value.name, device] = value.data

    def release_used(self, value: Value) -> None:
        """A forward has used `value`: release it, if that was the last one and nobody else is to have it."""
        if value.num_readers == 0 and self.is_brief(value) and not self._owned_as(value.name).is_owned:
            value.data = None

    def are_brief(self, program: Program) -> bool:
        """Returns whether slices are on their way in a step that is the last before they are likely to change."""
        return self._ends_window and any(type(name) is SliceName for name, _ in program.replicas)

    def is_brief(self, value: Value) -> bool:
        """Returns whether a parameter is held by those who use it alone."""
        return self._ends_window and type(value.name) is SliceName

    def bring(self, segment: Segment, device: torch.device) -> None:
        """Let the parameters that `segment` uses be here, of those that have come in an earlier step."""
        for value in segment.inputs:
            if value.data is None and value.name:
                value.data = self.tensors.get((value.name, str(device)))

    def end_step(self, graphs: Sequence[Graph], sent: frozenset[tuple[str, Worker]]) -> None:
        """A step has run.

        Args:
            graphs: What it was.
            sent: What went to whom.
        """
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()
        if not (self.known or sent):
            return
        if self._ends_window or writes_parameters(graphs):
            self.forget()
            return
        fixed = [entry for entry in sent if not self._owned_as(entry[0]).is_written]
        self.known |= frozenset(fixed)
        for name, _ in fixed:
            item = self._owned_as(name)
            if item.is_owned:
                self._versions[name] = item.tensor._version

    def _owned_as(self, name: str) -> Placed:
        return self.parameters[whole_name(name)]

    def begin_step(self, *, ends_window: bool) -> None:
        """Raise if a parameter has changed that others have as it was.

        Args:
            ends_window: Whether what runs next is the last before parameters are likely to change.
        """
        self._ends_window = ends_window
        for name, version in self._versions.items():
            if self._owned_as(name).tensor._version != version:
                raise RecordError(
                    f"{name} has been written to, and nobody has seen it.",
                    why="it belongs to a wide stage, whose other members have it as it was after the last step.",
                    hint="write to parameters with torch functions, outside of the model's modules",
                )


def writes_parameters(graphs: Sequence[Graph]) -> bool:
    """Returns whether calls may have written into parameters."""
    for call in [call for graph in graphs for call in graph.calls]:
        arguments = call.arguments or ()
        if any(isinstance(item := arguments[i], Value) and item.name for i in call.entry.mutated if i < len(arguments)):
            return True
        if any(item.is_written and item.is_parameter for item in getattr(call.target, "placed", ())):
            return True
    return False

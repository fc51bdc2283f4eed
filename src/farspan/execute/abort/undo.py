"""Undoes writes that turn out to come behind an exception: running statistics, other buffers.

Gradients are too large to be kept twice. Those that a backward behind the exception has added to are lost, and become
nan: the program clears them before it goes on, or sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from farspan.call.leaf import Leaf, Placed
from farspan.errors import RecordError
from farspan.execute.abort.order import Place, place_of_call, place_of_part
from farspan.graph import BackwardSegment, Call, Value
from farspan.torch_private import raw_grad, set_raw_grad

__all__ = ["Undo"]


class Undo:
    """The buffers that one rank has written in one step, as they were before."""

    def __init__(self, parameters: Mapping[str, Placed]) -> None:
        self._parameters = parameters
        self._before: list[tuple[Place, Placed, torch.Tensor]] = []
        """The contents of a buffer before a call that writes it."""
        self._weights: list[tuple[Place, str]] = []
        """Parameters that calls between modules have written, of which nothing is kept."""
        self._gradients: list[tuple[Place, str]] = []
        """The same of gradients."""
        self._parts: list[BackwardSegment] = []

    def note_call(self, call: Call) -> None:
        """`call` is about to run."""
        target = call.target
        if type(target) is Leaf:
            for item in target.placed:
                if item.is_written and item.is_owned:
                    self._keep(call, item)
            return
        for number in call.entry.mutated:
            assert call.arguments is not None
            item = call.arguments[number]
            if type(item) is not Value:
                continue
            if item.gradient_of:
                self._gradients.append((place_of_call(call), item.gradient_of))
            elif item.name:
                placed = self._parameters[item.name]
                if placed.is_parameter:
                    self._weights.append((place_of_call(call), item.name))
                elif placed.is_owned:
                    self._keep(call, placed)

    def note_part(self, part: BackwardSegment) -> None:
        """A share of a backward is about to run."""
        if part.backward.requested is None and part.accumulates_into:
            self._parts.append(part)

    def check(self, end: Place, what: str) -> None:
        """Raise if a parameter has been written by what comes behind `end`.

        Args:
            end: Where the exception was raised.
            what: Which, for people.
        """
        names = sorted({name for place, name in self._weights if place > end})
        if names:
            raise RecordError(
                f"the program cannot go on after {what}.",
                why=f"{names[0]} is written to by what the program does later, and that had run already.",
                hint="farspan.flush() before parameters are written: exceptions of the model are raised there",
            )

    def undo(self, end: Place, *, failed: BackwardSegment | None, incomplete: Iterable[str] = ()) -> None:
        """Let all that was written behind `end` be what it was, or lost.

        Args:
            end: Where the exception was raised.
            failed: The share of a backward that raised it, of which some gradients may have come and others not.
            incomplete: Parameters of this rank of which gradients have been made on others that have not come.
        """
        for place, placed, before in reversed(self._before):
            if place > end:
                tensor = placed.tensor.data
                if tensor.shape == before.shape and tensor.dtype == before.dtype:
                    tensor.copy_(before)
                else:
                    placed.tensor.data = before
        lost = {name for place, name in self._gradients if place > end}
        parts = [part for part in self._parts if place_of_part(part) > end or part is failed]
        lost.update(name for part in parts for name in _names(part.accumulates_into))
        for name in sorted(lost.union(incomplete)):
            tensor = self._parameters[name].tensor
            gradient = raw_grad(tensor) if self._parameters[name].is_owned else None
            if gradient is not None:
                set_raw_grad(tensor, _nan_like(gradient))
            elif name in incomplete:
                set_raw_grad(tensor, torch.full_like(tensor, torch.nan, requires_grad=False))

    def _keep(self, call: Call, item: Placed) -> None:
        self._before.append((place_of_call(call), item, item.tensor.detach().clone()))


def _names(accumulates_into: Iterable[object]) -> list[str]:
    """Returns the parameters behind the keys of a part, which are names, and leaves."""
    found: list[str] = []
    for key in accumulates_into:
        if isinstance(key, str):
            found.append(key)
        elif isinstance(key, Leaf):
            found += [item.name for item in key.placed if item.is_parameter]
    return found


def _nan_like(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is torch.strided:
        return torch.full_like(gradient, torch.nan)
    return gradient * torch.nan

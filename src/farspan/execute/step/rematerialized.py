"""Computes activations of chosen modules again in the backward.

Only what is differentiated in the same step as it runs is released: until then none of the user's code runs, so that
parameters, modes and the user's tensors are what they were.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence

from torch import nn

from farspan.call.draws.scope import active
from farspan.call.leaf import Leaf
from farspan.call.remat.modules import ModuleUnits, written_attributes
from farspan.call.remat.operations import OperationUnits, unit_of
from farspan.call.remat.unit import Unit
from farspan.execute.step.segment import StageDevice, run_call
from farspan.graph import BackwardSegment, Call, Segment
from farspan.program.program import Program

__all__ = ["Remat"]


class Remat:
    """The choice of one rank of what is computed again."""

    def __init__(self) -> None:
        self.modules: set[int] = set()
        """Ids of the modules that are computed again, and of all below them."""
        self.has_operations = False
        """Whether stages are split, so that modules are called operation by operation."""
        self.is_used = False
        """Whether anything of the program that runs may be computed again."""
        self._trained: Collection[Segment | None] = ()
        self._units: list[weakref.ref[Unit]] = []
        self._operations: OperationUnits | None = None
        """Those of the segment that runs."""

    def add(self, model: nn.Module, names: Sequence[str]) -> None:
        """Another model is distributed, of which the modules of these names are computed again."""
        self.modules.update(id(part) for name in names for part in model.get_submodule(name).modules())

    @contextlib.contextmanager
    def running(self, program: Program) -> Iterator[None]:
        """Run `program` in the body."""
        self._units = []
        self.is_used = bool(self.modules) or (self.has_operations and _has_units(program))
        if self.is_used:
            self._trained = {
                action.work.segment for action in program.actions if isinstance(action.work, BackwardSegment)
            }
        yield
        for unit in [reference() for reference in self._units]:
            if unit is not None and unit.is_waiting:
                unit.run_again()  # a later backward may come, when things are no longer what they were
        self._trained = ()

    def forget(self) -> None:
        """Forgets what waits to be computed again: it has been dropped."""
        self._units = []

    @contextlib.contextmanager
    def around(self, segment: Segment, on: StageDevice) -> Iterator[None]:
        """Run the calls of `segment` in the body; release what is to be computed again."""
        if segment not in self._trained:
            yield
            return
        leaves = {call.target for call in segment.calls if type(call.target) is Leaf}
        placed = [item for leaf in leaves for item in leaf.placed]
        outer = active.units
        if self.modules:
            active.units = ModuleUnits(
                self.modules,
                {id(item.tensor) for item in placed if item.is_written},
                written_attributes(leaves),
                any(call.entry.mutated for call in segment.calls if type(call.target) is Leaf),
                any(call.entry.is_random_in_python for call in segment.calls),
                self._note,
            )
        if any(call.unit is not None for call in segment.calls):
            self._operations = OperationUnits(segment, functools.partial(run_call, on=on), self._note)
        try:
            yield
            if self._operations is not None:
                self._operations.end()
        finally:
            active.units = outer
            if self._operations is not None:
                self._operations.give_up()
                self._operations = None

    def followed(self, before: Callable[[Call], None]) -> Callable[[Call], None]:
        """Returns what is called with each call that is about to run, as `before` is."""

        def follow(call: Call) -> None:
            before(call)
            if self._operations is not None:
                self._operations.begin(call)

        return follow

    def is_followed(self, call: Call) -> bool:
        """Returns whether `call` has run as a part of a unit of operations, so that autograd holds none of its
        arguments itself."""
        return self.is_used and call.segment in self._trained and unit_of(call) is not None

    def _note(self, unit: Unit) -> None:
        self._units.append(weakref.ref(unit))


def _has_units(program: Program) -> bool:
    segments = [action.work for action in program.actions if isinstance(action.work, Segment)]
    return any(call.unit is not None for segment in segments for call in segment.calls)

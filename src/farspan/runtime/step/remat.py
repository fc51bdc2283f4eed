"""Which activations of a step are computed again: whole segments, or chosen modules; what is waiting for it.

Only what is differentiated in the same step as it runs is let go: until then none of the user's code runs, so that
parameters, modes and the user's tensors are what they were.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from farspan.graph import Call, Part, Segment, Value
from farspan.lazy import Leaf, ModuleUnits, Unit, Unknown, WrittenBuffers, active, draws_by_itself, plain_attributes
from farspan.runtime.step.program import Program
from farspan.runtime.step.segment import run_call

__all__ = ["Remat"]


class Remat:
    """One rank's choice of what is computed again."""

    def __init__(self) -> None:
        self.whole: set[int] = set()
        """Ids of all modules of the models whose segments are computed again as wholes."""
        self.modules: set[int] = set()
        """Ids of modules that are computed again, and of all below them."""
        self._trained: Collection[Segment | None] = ()
        self._units: list[weakref.ref[Unit]] = []

    def add(self, model: nn.Module, names: bool | Sequence[str]) -> None:
        """Another model is distributed: all of it, none of it, or the modules of these names are computed again."""
        if isinstance(names, bool):
            self.whole.update(map(id, model.modules()) if names else ())
        else:
            self.modules.update(id(part) for name in names for part in model.get_submodule(name).modules())

    @contextlib.contextmanager
    def running(self, program: Program) -> Iterator[None]:
        """Run `program` in the body."""
        self._units = []
        if self.whole or self.modules:
            self._trained = {step.work.segment for step in program.steps if isinstance(step.work, Part)}
        yield
        for unit in [reference() for reference in self._units]:
            if unit is not None and unit.is_waiting:
                unit.run_again()  # a later backward may come, when things are no longer what they were
        self._trained = ()

    def around(self, segment: Segment) -> contextlib.AbstractContextManager[Any]:
        """Run the calls of `segment` in the body, its leaves being there; let go what is to be computed again."""
        if segment not in self._trained:
            return contextlib.nullcontext()
        calls = tuple(segment.calls)
        leaves = [call.target for call in calls if type(call.target) is Leaf]
        is_whole = any(id(leaf.module) in self.whole for leaf in leaves) if leaves else bool(self.whole)
        if is_whole and self._can_be_repeated(calls):
            return self._whole(segment, calls, leaves)
        return self._following(
            ModuleUnits(
                self.modules,
                {id(item.tensor) for leaf in leaves for item in leaf.placed if item.is_written},
                any(call.entry.is_random_in_python for call in calls),
                self._made,
            )
        )

    @contextlib.contextmanager
    def _whole(self, segment: Segment, calls: Sequence[Call], leaves: Sequence[Leaf]) -> Iterator[None]:
        inputs = dict(segment.leaves)
        placed = {item.name: item for leaf in leaves for item in leaf.placed if item.is_owned}
        parameters = [item.tensor for item in placed.values() if item.is_parameter]
        own = [value.data for value in segment.inputs if value not in inputs]
        given = [item for call in calls for item in call.arguments or () if isinstance(item, torch.Tensor)]
        unit = Unit(segment.describe(), [*inputs.values(), *parameters, *own, *given])
        seen: list[WrittenBuffers] = []
        written = {id(item.tensor) for item in placed.values() if item.is_written}
        num_own_draws = active.num_own_draws

        def remember(module: nn.Module) -> contextlib.AbstractContextManager[None]:
            modules = tuple(module.modules())
            unit.watch(plain_attributes(modules))
            seen.append(WrittenBuffers(modules, written))
            return contextlib.nullcontext()

        with unit.saving(), self._following(_EachCall(remember)):
            yield
        if active.num_own_draws == num_own_draws:
            unit.let_go(lambda: self._run_again(segment, calls, inputs, seen))
            self._made(unit)

    def _run_again(
        self,
        segment: Segment,
        calls: Sequence[Call],
        inputs: dict[Value, torch.Tensor],
        buffers: Sequence[WrittenBuffers],
    ) -> None:
        outputs = [(value, value.data) for call in calls for value in call.outputs]
        leaves, segment.leaves = segment.leaves, inputs
        then = iter(buffers)
        try:
            with self._following(_EachCall(lambda module: next(then).put_back())):
                for call in calls:
                    run_call(call, segment)
        finally:
            segment.leaves = leaves
            for value, data in outputs:
                value.data = data

    @staticmethod
    def _can_be_repeated(calls: Sequence[Call]) -> bool:
        return not any(
            type(call.entry) is Unknown
            or draws_by_itself(call)
            or any(item.is_parameter and item.is_written for item in getattr(call.target, "placed", ()))
            for call in calls
        )

    @staticmethod
    @contextlib.contextmanager
    def _following(units: Any) -> Iterator[None]:
        outer, active.units = active.units, units
        try:
            yield
        finally:
            active.units = outer

    def _made(self, unit: Unit) -> None:
        self._units.append(weakref.ref(unit))


class _EachCall:
    """Follows the module calls of a forward: each outermost one runs in a context."""

    def __init__(self, context: Callable[[nn.Module], contextlib.AbstractContextManager[None]]) -> None:
        self.context = context

    def call_module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        active.units = None
        try:
            with self.context(module):
                return call(module, *args, **kwargs)
        finally:
            active.units = self

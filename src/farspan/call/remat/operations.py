"""Operations whose activations are computed again: the calls of one segment that were recorded in one call of a chosen
module, where that is called operation by operation.

    segment of a member of a split stage
    s = p0 + p1        kept: what is computed again begins at sums, and exchanges nothing
    h = norm(s)        .
    u = h @ W[:, :n]   . one unit, from s: h, u, g are released, and computed again before q0's gradient is
    g = gelu(u)        .
    q0 = g @ V[:n]     .

What draws random numbers is kept, too, and so is what a module gives that is called as one: it is a unit of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from farspan.call.draws.scope import active
from farspan.call.leaf import Leaf
from farspan.call.remat.unit import Unit
from farspan.graph import Call, Segment, Value

__all__ = ["OperationUnits", "unit_of"]


class OperationUnits:
    """Follows the calls of a segment that run, and makes units of them.

    Args:
        segment: Whose calls run.
        run: Runs one call of a segment.
        made: Is given each unit.
    """

    def __init__(self, segment: Segment, run: Callable[[Call, Segment], None], made: Callable[[Unit], None]) -> None:
        self.segment = segment
        self.run = run
        self.made = made
        groups = [list(calls) for unit, calls in groupby(segment.calls, unit_of) if unit is not None]
        self._groups = {calls[0]: calls for calls in groups}
        """By its first call, what is computed again together."""
        self._current: Sequence[Call] = ()
        self._saving = contextlib.ExitStack()
        self._unit: Unit | None = None
        self._inputs: dict[Value, torch.Tensor] = {}
        self._given: list[torch.Tensor] = []

    def begin(self, call: Call) -> None:
        """Call this before each call."""
        group = self._groups.get(call)
        if self._current and (group is not None or unit_of(call) is None):
            self.end()
        if group is not None:
            self._begin(group)

    def end(self) -> None:
        """All calls have run, or those that are computed again together."""
        unit, group, inputs, given = self._unit, self._current, self._inputs, self._given
        self.give_up()
        if unit is not None:
            unit.release(_again(group, inputs, self.segment, self.run), [*inputs.values(), *given])
            self.made(unit)

    def give_up(self) -> None:
        """A call has raised: what has run is kept."""
        self._saving.close()
        self._unit, self._current, self._inputs, self._given = None, (), {}, []

    def _begin(self, group: Sequence[Call]) -> None:
        self._inputs, self._given = _inputs_of(group, self.segment)
        self._current = group
        self._unit = Unit(group[0].entry.name, [*self._inputs.values(), *self._given])
        self._saving.enter_context(self._unit.saving())


def unit_of(call: Call) -> object | None:
    """Returns what `call` is computed again with; None if it is kept, though others of its module are not."""
    is_kept = type(call.target) is Leaf or call.entry.is_random or call.saved_hooks is not None
    return None if is_kept else call.unit


def _inputs_of(group: Sequence[Call], segment: Segment) -> tuple[dict[Value, torch.Tensor], list[torch.Tensor]]:
    """Returns what calls take from before them: of values, as leaves of autograd; and plain tensors."""
    made = {value for call in group for value in call.outputs}
    inputs: dict[Value, torch.Tensor] = {}
    given: list[torch.Tensor] = []
    written: set[Value] = set()
    for call in group:
        for number, item in enumerate(call.arguments or ()):
            if type(item) is not Value:
                given.append(item)
            elif item not in made and number not in call.entry.unused:
                tensor = segment.leaves.get(item, item.data)
                inputs[item] = tensor.detach().requires_grad_(tensor.requires_grad)
                if number in call.entry.mutated and item not in segment.leaves:
                    written.add(item)
    for value in written:  # in place, while the unit runs: it begins at what that was
        inputs[value] = inputs[value].detach().clone().requires_grad_(inputs[value].requires_grad)
    return inputs, given


def _again(
    group: Sequence[Call],
    inputs: dict[Value, torch.Tensor],
    segment: Segment,
    run: Callable[[Call, Segment], None],
) -> Callable[[], None]:
    """Returns what runs calls once more from `inputs`; the data of their values is afterwards what it was."""
    present = None if active.recorder is None else active.recorder.held_objects.moments.present
    last = {item: call for call in group for item in (*(call.arguments or ()), *call.outputs) if type(item) is Value}
    over: dict[Call, list[Value]] = {}
    for value, call in last.items():
        if value not in inputs:
            over.setdefault(call, []).append(value)

    def again() -> None:
        apart = Segment(segment.graph, segment.index, segment.level, segment.stage)
        apart.leaves.update(inputs)
        before = {value: value.data for call in group for value in call.outputs}
        try:
            with contextlib.nullcontext() if present is None else present.being():
                for call in group:
                    run(call, apart)
                    for value in over.get(call, ()):
                        value.data = before[value]
        finally:
            for value, data in before.items():
                value.data = data

    return again

"""`p.grad.norm().item()` in a loop over the parameters: computed and broadcast for many of them at once.

    first read     one parameter       (it could be the only one)
    second read    the next two with it
    fourth read    the next four with it ...

Each read that nobody has foreseen foresees as many as have been read in this way, or as many as were read after the
last backward: a hundred parameters take seven small steps the first time, and two from then on.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from farspan.call.pytree.template import rebuild
from farspan.graph import Call, Value
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from farspan.call.leaf import Placed

__all__ = ["Reads"]

_LONGEST = 8
"""Calls from a gradient to what is read of it."""
Way = tuple[tuple[Any, Any, tuple[int, ...]], ...]
"""The computation of a value from a gradient: for each call its target, its template, and which earlier results it
takes."""


class Reads:
    """The values of gradients that were read since the last backward, and those that are foreseen."""

    def __init__(
        self, gradient_of: Callable[[Placed], torch.Tensor | None], parameters: Callable[[], Iterable[Placed]]
    ) -> None:
        self._gradient_of = gradient_of
        self._parameters = parameters
        self.has_any = False
        """Whether any have been read since gradients have last become other tensors."""
        self._foreseen: dict[tuple[Value, Way], LazyTensor] = {}
        self._num_reads: Counter[Way] = Counter()
        self._num_before: Counter[Way] = Counter()
        """The number of reads after the backward before this one."""

    def foresee(self, value: Value) -> Value | None:
        """Record for the parameters to come what is about to be read of one; the value, if it was foreseen itself."""
        found = _way_to(value)
        if found is None:
            return None
        source, way, calls = found
        self.has_any = True
        num_reads = self._num_reads[way]
        self._num_reads[way] += 1
        known = self._foreseen.get((source, way))
        if known is not None:
            return known._value
        for placed in self._following(source, max(num_reads * 2, self._num_before[way] - 1) if num_reads else 0):
            gradient = self._gradient_of(placed)
            if type(gradient) is LazyTensor and gradient._value.is_gradient:
                self._foreseen[gradient._value, way] = _repeat(calls, source, gradient)
        return None

    def forget(self) -> None:
        """Gradients are other tensors now."""
        self.has_any = False
        if self._num_reads:
            self._num_before, self._num_reads = self._num_reads, Counter()
        self._foreseen.clear()

    def _following(self, source: Value, number: int) -> list[Placed]:
        """Returns the gradient of the parameter that is so many places after this gradient's."""
        if not number:
            return []
        parameters = [placed for placed in self._parameters() if placed.is_parameter]
        names = [placed.name for placed in parameters]
        begin = names.index(source.gradient_of) + 1
        return parameters[begin : begin + number]


def _way_to(value: Value) -> tuple[Value, Way, list[Call]] | None:
    """Returns how a value is computed from one gradient and nothing else: the gradient, the way, and its calls."""
    source: Value | None = None
    calls: list[Call] = []
    todo = [value]
    while todo:
        item = todo.pop()
        call = item.call
        if call is None or not item.pending:
            if not item.is_gradient or item is not (source or item):
                return None
            source = item
        elif call not in calls:
            entry = call.entry
            if len(calls) == _LONGEST or len(call.outputs) != 1 or entry.mutated or entry.is_random:
                return None
            calls.append(call)
            for argument in call.arguments or ():
                if not isinstance(argument, Value):
                    return None
                todo.append(argument)
    if source is None:
        return None
    calls.sort(key=lambda call: (call.graph.index, call.index))
    places = {source: -1, **{call.outputs[0]: place for place, call in enumerate(calls)}}
    way = tuple(
        [(call.target, call.template, tuple([places[item] for item in call.arguments or ()])) for call in calls]
    )
    return source, way, calls


def _repeat(calls: list[Call], source: Value, gradient: LazyTensor) -> LazyTensor:
    """Record the same calls with another gradient."""
    made: dict[Any, LazyTensor] = {source: gradient}
    for call in calls:
        args, kwargs = rebuild(call.template, [made[item] for item in call.arguments or ()])
        made[call.outputs[0]] = gradient._recorder.dispatch(call.target, args, kwargs)
    return made[calls[-1].outputs[0]]

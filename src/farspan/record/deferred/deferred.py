"""The deferred calls of one rank.

    out = model(x); ...; optimizer.step()
    if farspan.rank() == 0:
        print(out[0].argmax())                deferred, then read: rank 0 fetches out[0] and computes it alone
    state = 0.9 * state + 0.1 * out           deferred on every rank ...
    loss = model(x + state)                   ... and recorded here, on every rank

So a rank that prints or decodes what the others do not read records nothing that they have not recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from farspan.call.draws.drawing_functions import DRAWS
from farspan.call.function_call import FunctionCall
from farspan.call.infer.entry import Entry, meta_of
from farspan.call.leaf import Leaf
from farspan.call.modes import current_modes, saved_hooks
from farspan.call.naming import find_where, format_where
from farspan.call.pytree.template import flatten_arguments, rebuild
from farspan.graph import Call, Value
from farspan.record.deferred.compute import Computing
from farspan.record.deferred.deferred_call import (
    DeferredCall,
    are_known,
    can_go_back,
    is_deferred,
    is_ready,
    is_view,
    sources_are_held,
)
from farspan.record.memory.twins import put_value
from farspan.record.ops.op_placement import stage_for
from farspan.record.ops.results import answer
from farspan.record.ops.views import Through, write_through
from farspan.record.runtime import VALUE_IS_READ
from farspan.record.tensor import LazyTensor, plain_versions
from farspan.record.unrecorded import plainly

if TYPE_CHECKING:
    from farspan.call.leaf import Target
    from farspan.call.modes import Modes
    from farspan.graph import Template
    from farspan.record.recording import Recording

__all__ = ["Deferred"]


class Deferred:
    """The calls that this rank has deferred. With one rank there are none."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self.computing = Computing(recorder)
        self.has_any = False
        """True if a call has been deferred since the program began."""
        self._calls: list[weakref.ref[DeferredCall]] = []

    # When the program calls an op.

    def can_wait(self, target: Target, entry: Entry, arguments: Sequence[Any], tensors: Sequence[torch.Tensor]) -> bool:
        """Returns whether a call needs only what has been computed, and writes into nothing else: alike on every
        rank."""
        for item in arguments:
            if type(item) is Value and type(item.call) is Call and item.pending:
                return False  # most calls: what they need is still to be computed
        if entry.is_random or not self._is_op(target):
            return False
        if entry.requires_grad and any(isinstance(item, Value) and can_go_back(item) for item in arguments):
            return False  # gradients are added up in the order in which calls are recorded
        if any(shared >= 0 and type(tensors[shared]) is not LazyTensor for shared in entry.shares):
            return False  # a view of a plain tensor, into which the program may write
        if entry.mutated:
            is_recorded = len(entry.mutated) == 1 and type(tensors[entry.mutated[0]]) is LazyTensor
            return is_recorded and min(entry.same_as, default=0) >= 0 and are_known(arguments, tensors)
        return are_known(arguments, tensors) or is_view(entry, arguments)

    def can_run(self, target: Target, tensors: Sequence[torch.Tensor]) -> bool:
        """Returns whether each rank can run a call that writes into plain memory, with what has been computed."""
        has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if has_gradient or not self._is_op(target):
            return False
        return are_known([self.recorder.argument(tensor) for tensor in tensors], tensors)

    def _is_op(self, target: Target) -> TypeGuard[Callable[..., Any]]:
        """Returns whether a call of `target` may be deferred; with one rank there are no others."""
        if self.recorder.engine.num_ranks == 1 or self.recorder.is_writing:
            return False
        return type(target) not in (Leaf, FunctionCall) and not (type(target) is Through and target.is_in_place)

    def take(self, view: Any, template: Template, tensor: LazyTensor) -> Any:
        """Take a view of a tensor, also of one that has yet to be computed."""
        recorder = self.recorder
        value, modes = recorder.argument(tensor), current_modes()
        metas = [value.meta if isinstance(value, Value) else meta_of(value)]
        entry: Any = recorder.predict(view, template, metas, modes)
        return self.defer(view, template, [value], entry, modes, [tensor], ((), {}))

    def defer(
        self,
        target: Target,
        template: Template,
        arguments: Sequence[Any],
        entry: Entry,
        modes: Modes,
        tensors: list[torch.Tensor],
        given: tuple[Any, ...],
    ) -> Any:
        """Keep a call for later, and return what the program gets."""
        recorder = self.recorder
        if entry.mutated:  # what is written into is a new value
            write_through(recorder, target, template, tensors, entry.mutated[0], None)
            return tensors[entry.same_as[0]] if entry.same_as else None
        own = [item if isinstance(item, Value) else item.detach().clone() for item in arguments]
        stage = stage_for(recorder, entry, tensors, [item for item in own if isinstance(item, Value)])
        call = DeferredCall(
            target=target,
            template=template,
            arguments=own,
            entry=entry,
            stage=stage,
            modes=modes,
            where=find_where(4),
            tensors=tensors,
        )
        call.graph, call.index = recorder.current, len(recorder.current.calls)
        call.region, call.saved_hooks = recorder.regions.of(modes), saved_hooks()
        call.moment = recorder.held_objects.moments.latest
        call.outputs = tuple([Value(meta, stage, call=call, index=i) for i, meta in enumerate(entry.metas)])
        self._calls.append(weakref.ref(call))
        self.has_any = True
        result = answer(recorder, call, entry, tensors, given)
        call.give()
        return result

    def run_here(self, target: Target, template: Template, tensors: Sequence[torch.Tensor]) -> tuple[Any] | None:
        """Run a call whose result depends on data, if it needs only what has been computed, and no gradient.

        Returns:
            Its result, a plain one on every rank that calls this; None where it cannot run so.
        """
        recorder = self.recorder
        if not self._is_op(target) or target in DRAWS:
            return None
        arguments = [recorder.argument(tensor) for tensor in tensors]
        has_gradient = any(isinstance(item, Value) and can_go_back(item) for item in arguments)
        if not are_known(arguments, tensors) or (torch.is_grad_enabled() and has_gradient):
            return None
        data = [recorder.engine.read(item) if isinstance(item, Value) else item for item in arguments]
        data = [item.detach().clone() for item in data]
        versions = plain_versions(data)
        args, kwargs = rebuild(template, data)
        with plainly(self.recorder):
            result = target(*args, **kwargs)
        return (result,) if plain_versions(data) == versions else None

    # When a recorded call needs the result.

    def argument(self, value: Value) -> Value | torch.Tensor:
        """Returns the value itself, or the plain tensor that every rank has in its place."""
        known = _plain(value)
        return value if known is None else known

    def recorded(self, arguments: Sequence[Any], entry: Entry, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Returns the arguments of a call that is about to be recorded; those that were deferred are recorded now."""
        if entry.mutated:
            self._before_write(entry, tensors)
            arguments = [self.recorder.argument(tensor) for tensor in tensors]
        self.record_all(arguments)
        return arguments

    def record_all(self, arguments: Sequence[Any]) -> None:
        """Record the calls that have made `arguments`."""
        for item in arguments:
            if is_deferred(item):
                self._record(item.call)

    def record_one(self, tensor: Any) -> None:
        """Let a tensor be a recorded one, if it is deferred."""
        if type(tensor) is not LazyTensor or not is_deferred(tensor._value):
            return
        known = _plain(tensor._value)
        if known is None:
            self.record_all([tensor._value])
            return
        given = ((known,), {})
        template, tensors = flatten_arguments(*given)
        stage = tensor._value.stage
        put_value(tensor, self.recorder.record(torch.clone, template, tensors, stage, given=given)._value)

    def _before_write(self, entry: Entry, tensors: Sequence[torch.Tensor]) -> None:
        """A call is about to be recorded that writes into some of `tensors`."""
        written = [tensor for i in entry.mutated if type(tensor := tensors[i]) is LazyTensor]
        values = {tensor._value for tensor in written}
        using = [call for call in self._alive() if call.uses(values)]
        for call in using:
            if is_ready(call):
                self.computing.compute(call)
                call.is_outdated = True
            else:
                self._record(call)
        _settle(call for call in using if call.segment is None and not call.entry.requires_grad)
        for tensor in written:
            self.record_one(tensor)

    def _record(self, last: Any) -> None:
        """Append a call and those it needs to the current micro-batch."""
        graph = self.recorder.current
        todo = [last]
        while todo:
            call = todo[-1]
            needed = [item.call for item in call.arguments or () if is_deferred(item) and not item.call.is_settled]
            if call.segment is None and needed:
                todo += needed
                continue
            todo.pop()
            if call.segment is not None:
                continue
            if call.is_outdated:
                self.recorder.refuse(
                    f"{call.entry.name} was called on a tensor that has been written into since",
                    why=f"called at {format_where(call.where)}; its result is needed at {format_where(find_where())}.",
                    hint="detach() the result, or write out of place",
                )
            call.arguments = [self.argument(item) if isinstance(item, Value) else item for item in call.arguments]
            values = [item for item in call.arguments if isinstance(item, Value)]
            call.versions = plain_versions(call.arguments) if len(values) < len(call.arguments) else ()
            call.unit = self.recorder.splitting.unit
            graph.add(call, values)
            call.take_back()
            graph.note(call, values, call.entry.digest)

    # When a rank reads.

    def can_read(self, value: Value) -> bool:
        """Returns whether this rank can compute the data of `value` without the other ranks running anything."""
        return self.computing.can_compute(value)

    def read(self, value: Value) -> torch.Tensor:
        """Compute a value here, of what other ranks have."""
        call: Any = value.call
        if call.results is None and not is_ready(call):
            self.recorder.engine.flush(VALUE_IS_READ)
            if not self.can_read(value):
                return self.recorder.engine.read(value)
        return self.computing.compute(call)[value.index]

    def computed(self, tensor: Any) -> Any:
        """Returns the tensor, or the plain one that every rank computes in its place."""
        return self.read(tensor._value) if type(tensor) is LazyTensor and is_deferred(tensor._value) else tensor

    def settle(self) -> None:
        """The ranks run what they have recorded: what was deferred and is still held is computed here, and is the same
        plain tensor on every rank that has it, so that nothing that it was made of is kept. Not so what may still get
        gradient, and large views, which keep their memory alive as in torch.
        """
        if not self._calls:
            return
        alive = self._alive()
        ready = [call for call in alive if call.is_held() and not call.is_large_view and is_ready(call)]
        self.computing.compute_all(ready)
        _settle(call for call in ready if not call.entry.requires_grad)  # not all that this rank has read already
        for call in alive:
            if not call.is_settled:
                call.is_outdated |= not sources_are_held(call)  # their owners release them now
        self._calls = [weakref.ref(call) for call in alive if not call.is_settled]
        self.computing.forget()

    def _alive(self) -> list[DeferredCall]:
        """Returns the calls that are neither recorded nor settled, and that something may still need."""
        found = [call for reference in self._calls if (call := reference()) is not None]
        return [call for call in found if call.segment is None and call.arguments is not None]


def _plain(value: Value) -> torch.Tensor | None:
    """Returns the result that every rank has computed, if its call is settled."""
    call = value.call
    if type(call) is not DeferredCall or not call.is_settled:
        return None
    assert call.results is not None
    return call.results[value.index]


def _settle(calls: Iterable[DeferredCall]) -> None:
    for call in calls:
        assert call.results is not None
        call.arguments, call.tensors = None, ()
        for reference, result in zip(call.values, call.results, strict=True):
            value = reference()
            if value is not None:
                value.data = result

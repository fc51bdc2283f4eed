"""Calls that are recorded once more: what a derivative computes again is given what the call itself was given.

    h = f(x); y = g(h); print(y)               f and g have run, and the values between them are gone
    d = torch.autograd.grad(y, x, create_graph=True)[0]
                                               calls  f (for h), g', f'

A value that the program still holds is there. Any other is computed again, from what it was computed of, and so on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from farspan.call.derivative import FunctionAgain, ModuleAgain, ModuleDerivative
from farspan.call.infer.entry import intern
from farspan.call.leaf import Leaf
from farspan.call.modes import apply_modes
from farspan.call.module_tables import has_user_hooks
from farspan.call.pytree.template import flatten, rebuild
from farspan.graph import EVERYWHERE, Call, Meta, Value, whole_name
from farspan.record.derivatives.refusal import refuse_second_derivatives
from farspan.record.tensor import LazyTensor, plain_versions

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from farspan.record.recording import Recording

__all__ = ["Given", "RecordedAgain", "arguments_of", "repeating_leaf"]

_WRITES_BUFFERS = "which reads buffers that calls write"


class Given(NamedTuple):
    """What a call was given, for one that computes it again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    replaced: dict[str, torch.Tensor]
    """By its module's names, what stood for parameters and buffers."""
    places: dict[int, int]
    """By id of each of these tensors its number among them."""
    written: tuple[int, ...]
    """The numbers of those that the call writes into."""


class RecordedAgain:
    """The values on the way of one gradient, as tensors that calls can be given."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self._tensors: dict[Value, torch.Tensor] = {}
        self._overwritten: dict[Any, set[int]] = {}
        """By segment, the ids of the values that calls in it write over."""

    def given_to(self, call: Call) -> Given:
        """Returns what a call was given.

        Raises:
            WholeError: It would not give again what it has given, or what it was given cannot be had.
        """
        leaf = _leaf_of(call)
        arguments = list[Any](call.arguments or ())
        slots = () if leaf is None else leaf.tables.names_of_slots()
        reason = self._why_not(call, leaf)
        if reason or slots is None:
            raise _refused(call, reason or "whose module has been changed since")
        call.is_repeated = True
        for value in [item for item in arguments if isinstance(item, Value)]:
            if self._has_to_be_made(value):
                self._record_again(value, call.feeding)
        own, in_slots = arguments_of(call)
        args, kwargs, *_ = rebuild(call.template, [self.tensor_of(item) for item in own])
        replaced = {} if leaf is None else self._buffers_before(call, leaf)
        for item, names in zip(in_slots, slots, strict=True):
            replaced |= dict.fromkeys(names, self.tensor_of(item))
        places = {id(item): number for number, item in enumerate(flatten((args, kwargs, replaced))[1])}
        written = tuple([places[id(self.tensor_of(arguments[number]))] for number in call.entry.mutated])
        self._keep_overwritten([item for item in arguments if isinstance(item, Value)])
        return Given(args, kwargs, replaced, places, written)

    def tensor_of(self, item: Value | torch.Tensor) -> torch.Tensor:
        """Returns an argument of a recorded call as what it was then."""
        if not isinstance(item, Value):
            return item
        known = self._tensors.get(item)
        if known is None:
            if item.stage == EVERYWHERE:
                known = item.data
            elif item.name and item.call is None and item.meta.requires_grad:
                known = self.recorder.engine.parameters[item.name].tensor
            else:
                handle = item.lazy
                known = LazyTensor.make(item, self.recorder)
                if handle is not None and handle() is not None:
                    item.lazy = handle  # the program's own
            self._tensors[item] = known
        return known

    @contextlib.contextmanager
    def recording_as(self, call: Call) -> Iterator[None]:
        """The call that is recorded in the body computes `call` again: in its modes, with its draws, at its moment."""
        recorder = self.recorder
        recorder.draws.repeated = call if call.entry.is_random else None
        try:
            with apply_modes(call.modes):
                yield
        finally:
            recorder.draws.repeated = None
        recorder.current.calls[-1].moment = call.moment

    # Values that are gone.

    def _is_gone(self, value: Value) -> bool:
        """Returns whether a value has been computed, and the program no longer holds it."""
        if value.call is None or value.pending or value.stage == EVERYWHERE:
            return False
        handle = None if value.lazy is None else value.lazy()
        return handle is None or handle._value is not value

    def _has_to_be_made(self, value: Value) -> bool:
        return value not in self._tensors and self._is_gone(value)

    def _record_again(self, value: Value, feeding: Mapping[Value, Call]) -> None:
        """Records the call that has computed a value once more, and before it those of what that was given."""
        todo, calls = [(value, feeding)], dict[tuple[int, int], Call]()
        while todo:
            value, feeding = todo.pop()
            call = value.call
            assert call is not None
            if value.index >= len(call.entry.metas):
                name = call.buffer_names[value.index - len(call.entry.metas)]
                self._tensors[value] = self.tensor_of(self._buffer_before(call, name, value.meta))
                continue
            if call.arguments is None:
                call = feeding.get(value)
            if call is None or call.arguments is None:
                raise refuse_second_derivatives(
                    f"it needs the {value.describe()} again, and what that was computed from has been released"
                )
            key = (call.graph.index, call.index)
            if key not in calls:
                calls[key] = call
                given = [item for item in call.arguments if isinstance(item, Value) and self._has_to_be_made(item)]
                todo += [(item, call.feeding) for item in given]
        for key in sorted(calls):
            self._record_call(calls[key])

    def _record_call(self, call: Call) -> None:
        recorder, leaf, given = self.recorder, _leaf_of(call), self.given_to(call)
        num_calls = len(recorder.current.calls)
        with self.recording_as(call):
            if leaf is not None and not leaf.is_repeating:
                again = repeating_leaf(recorder, leaf, ModuleAgain)
                recorder.call_leaf(again, (given.args, given.kwargs, given.replaced, given.written), {})
            elif leaf is not None:
                recorder.call_leaf(leaf, given.args, given.kwargs)
            elif given.written:
                function: Any = call.target
                target = FunctionAgain(function)
                recorder.record_call(target, (given.args, given.kwargs, given.written), {}, call.stage)
            else:
                function = call.target
                recorder.record_call(function, given.args, given.kwargs, call.stage)
        found = recorder.current.calls[-1]
        is_alike = len(recorder.current.calls) == num_calls + 1 and len(found.entry.metas) == len(call.entry.metas)
        if not is_alike or not all(map(_is_alike, found.entry.metas, call.entry.metas)):
            raise _refused(call, "which gives something else now")
        for old, value in zip(call.outputs, found.outputs, strict=False):
            if old is not None and self._is_gone(old):
                self._tensors[old] = LazyTensor.make(value, recorder)

    # Buffers.

    def _buffers_before(self, call: Call, leaf: Leaf) -> dict[str, torch.Tensor]:
        """Returns the buffers that calls of a module write, as they were before this one, by the module's names."""
        if leaf.is_repeating:
            return {}  # they are among its arguments
        names = {id(item): name for name, item in leaf.module.named_buffers()}
        return {
            names[id(item.tensor)]: self.tensor_of(self._buffer_before(call, item.name, item.meta))
            for item in leaf.buffers
            if item.is_written
        }

    def _buffer_before(self, call: Call, name: str, meta: Meta) -> Value:
        """Returns a buffer as it was before a call: a further result of that, if it has yet to run."""
        num_results = len(call.entry.metas)
        if name not in call.buffer_names:
            call.buffer_names = (*call.buffer_names, name)
        number = num_results + call.buffer_names.index(name)
        if not call.segment.executed and number < len(call.outputs):
            return call.outputs[number]
        plain = intern(Meta(meta.shape, meta.stride, meta.dtype, meta.device, False))
        value = Value(plain, call.stage, call, number)
        if not call.segment.executed:
            call.outputs = (*call.outputs, value)
        else:
            value.data = call.buffers.get(name)
            if call.arguments is None:
                raise _refused(call, "which has been gone through by a backward, and was not kept")
        return value

    def _keep_overwritten(self, values: list[Value]) -> None:
        """Lets segments keep what calls in them have written over: it is read once more."""
        for value in values:
            segment = value.segment
            if segment is None:
                continue
            if segment not in self._overwritten:
                writing = [call for call in segment.calls if call.entry.mutated and call.arguments is not None]
                written = [(call.arguments or ())[number] for call in writing for number in call.entry.mutated]
                self._overwritten[segment] = set(map(id, written))
            if id(value) in self._overwritten[segment]:
                segment.outputs[value] = None

    # What cannot be computed again alike.

    def _why_not(self, call: Call, leaf: Leaf | None) -> str:
        """Returns why a call would not give again what it has given; "" where it would."""
        entry = call.entry
        arguments: Sequence[Any] = call.arguments or ()
        if entry.is_random and (entry.is_random_in_python or call.draws is None or call.draws.end is None):
            return "which draws random numbers that are not those of one process, or nobody knows how many"
        if entry.changes or entry.attributes or entry.is_ordered:
            return "which writes into objects it is given, or into its module"
        if any(not _is_recorded_apart(arguments[number]) for number in entry.mutated):
            return "which writes into a parameter, a buffer or a gradient"
        if call.hooks or call.saved_hooks is not None:
            return "on whose results there are hooks"
        if call.versions and call.versions != plain_versions(arguments):
            return "an argument of which has been written to since"
        if leaf is not None:
            if leaf.is_resolved or leaf.attributes:
                return "whose result, or an attribute that it sets, depends on data"
            if has_user_hooks(leaf.module):
                return "which has hooks"
            if any(item.is_written and item.stage != leaf.stage for item in leaf.buffers):
                return _WRITES_BUFFERS
        return self._changed_since(call, leaf) if call.segment.executed else ""

    def _changed_since(self, call: Call, leaf: Leaf | None) -> str:
        """Returns what a call that has run would find otherwise now; "" if that is nothing."""
        used = [] if leaf is None else list(leaf.placed)
        for value in [item for item in call.arguments or () if isinstance(item, Value)]:
            if value.gradient_of or value.state_of is not None:
                return "which reads a gradient, or an optimizer's state, and has run already"
            if value.name and value.call is None:
                used.append(self.recorder.engine.parameters[whole_name(value.name)])
        number = call.graph.index
        for item in used:
            if item.is_written:
                if item.is_parameter or leaf is None:
                    return "which reads what calls write, and has run already"
                was_known = call.state is not None and item.name in call.state[3]
                if not was_known or not (leaf.is_repeating or call.entry.requires_grad):
                    return _WRITES_BUFFERS  # nobody has kept them
            elif number < item.changed_at:
                return f"which has run already; {item.name} has been written to since"
        if leaf is not None and not _is_set_as_in(call, leaf):
            return "which has run already; its module has been set otherwise since (eval, requires_grad, an object)"
        return ""


def _refused(call: Call, reason: str) -> Exception:
    return refuse_second_derivatives(f"it goes through {call.describe()}, {reason}")


def arguments_of(call: Call) -> tuple[list[Any], list[Any]]:
    """Returns a call's own arguments, and those that stood for parameters and buffers of its module."""
    leaf, arguments = _leaf_of(call), list[Any](call.arguments or ())
    if leaf is None:
        return arguments, []
    number = len(arguments) - leaf.num_extra
    return arguments[:number], arguments[number + len(leaf.foreign) :]


def _leaf_of(call: Call) -> Leaf | None:
    return call.target if isinstance(call.target, Leaf) else None


def _is_recorded_apart(item: Any) -> bool:
    """Returns whether it is a recorded tensor of which the old versions are kept as long as they are read."""
    return isinstance(item, Value) and item.stage != EVERYWHERE and not item.name and not item.gradient_of


def _is_alike(one: Meta, other: Meta) -> bool:
    return (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)


def _is_set_as_in(call: Call, leaf: Leaf) -> bool:
    """Returns whether a module is set, and holds what it did, as in a call; each change of train and eval is a setting,
    too."""
    if call.state is None or call.state[0] is None:
        return False
    then, own, versions, _ = call.state
    now = leaf.state_key()
    settings = [[item for item in each[1] if not item[0].endswith(".training")] for each in (then, now)]
    if then[0] != now[0] or settings[0] != settings[1]:
        return False
    return own is None or not (own.has_changed() or (versions and versions != plain_versions(own.tensors)))


def repeating_leaf(recorder: Recording, leaf: Leaf, kind: type[ModuleAgain | ModuleDerivative]) -> Leaf:
    """Returns the leaf of a kind that computes another one's calls again; the same for each of its calls."""
    module = leaf.module
    while isinstance(module, (ModuleAgain, ModuleDerivative)):
        module = module.module
    key = (id(module), kind, leaf)
    known = recorder.variants.get(key)
    if known is None:
        repeating = kind(leaf.module)
        placed = [recorder.placed.get(id(item)) for item in (*module.parameters(), *module.buffers())]
        name = f"derivative of {leaf}" if kind is ModuleDerivative else f"{leaf} again"
        known = Leaf(name, repeating, leaf.stage, [item for item in placed if item is not None])
        known.is_repeating, known.has_buffers = True, False
        recorder.variants[key] = known
        recorder.leaf_parts.add(id(repeating))
    return known

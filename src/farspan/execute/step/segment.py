"""Running one segment for real: forward from its inputs, backward from the gradients of its outputs.

    receive -> detach (a leaf) -> calls -> detach -> send          forward
    gradients of outputs -> torch.autograd.backward -> leaf.grad   backward

Autograd never crosses a border: each segment is its own small autograd graph, so no engine run ever waits.

Where the tensors of a stage are, the plan says: the program may name another device. Metadata are what the program
sees, on every rank; a value is brought to its place when it comes to a stage.

    the program says    a stage on cuda:1    a stage on the CPU
    cuda:0              cuda:1               cpu
    cpu                 cpu                  cpu                    where the program has the model on a device
    cpu                 cuda:1               cpu                    where it has the model on the CPU
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from farspan.call.buffer_versions import buffers_before, own_versions, versioned
from farspan.call.draws.program_draws import around_backward
from farspan.call.draws.scope import active, seeded
from farspan.call.infer.entry import Entry, Unknown
from farspan.call.leaf import Leaf, Placed, tensor_of
from farspan.call.modes import Modes, apply_modes, in_region, under_saved_hooks, with_device
from farspan.call.module_tables import has_user_hooks
from farspan.call.naming import format_where
from farspan.call.pytree.template import flatten, plain_arguments, rebuild
from farspan.call.side_effects.attributes import (
    real_attributes,
    unchanged_as_before,
    unchanged_in_backward,
    watched_attributes,
)
from farspan.call.side_effects.changes import MutableArguments, describe_result, rebuild_arguments
from farspan.call.user_hooks import without_user_hooks
from farspan.call.wire.users_line import note_line, note_line_of_backward
from farspan.devices import CPU
from farspan.errors import RecordError
from farspan.execute.backward.around import caught_at, holding_foreign, passed_on
from farspan.execute.backward.split import Deferred, split_backward
from farspan.execute.step.device_copies import DeviceCopies
from farspan.graph import EVERYWHERE, BackwardSegment, Call, Edge, Segment, SliceName, Value, released_error
from farspan.record.across_ranks.resolved_calls import as_before, noting_raised, registering_nothing, resolve_from_run
from farspan.record.tensor import PassedBy, plain_versions
from farspan.torch_private import as_activation, raw_grad, set_raw_grad

__all__ = ["StageDevice", "call_target", "run_backward", "run_call", "run_forward"]
_NO_OBJECTS = MutableArguments({})
_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class StageDevice:
    """The device of a stage, in the place of those that the program names.

    Attributes:
        device: Where the stage computes.
        takes_cpu: Whether it has what the program has on the CPU, too.
        copies: Of the step that runs, where this rank has several workers.
    """

    device: torch.device
    takes_cpu: bool = False
    copies: DeviceCopies | None = None

    def of(self, named: torch.device) -> torch.device:
        """Returns where a tensor is that the program has on a device."""
        stays = not self.takes_cpu if named.type == "cpu" else named.type == "meta"
        return named if stays else self.device

    def brought(self, tensor: torch.Tensor, named: torch.device, made_by: Any) -> torch.Tensor:
        """Returns what another stage of this rank may have made, on the device where this one has it.

        Args:
            tensor: What has been made.
            named: Where the program has it.
            made_by: The work that has made it.
        """
        place = self.of(named)
        if tensor.device == place:
            return tensor
        return tensor.to(place) if self.copies is None else self.copies.bring(tensor, place, made_by)

    def modes(self, modes: Modes) -> Modes:
        """Returns the modes in which the stage runs what was recorded in `modes`: autocast and the device for new
        tensors are those of its own device."""
        grad, inference, autocast, settings = modes
        makes_elsewhere = settings.device is not None or (self.takes_cpu and self.device.type != "cpu")
        if not (autocast or makes_elsewhere):
            return modes
        kinds = tuple([(self.of(torch.device(kind)).type, *rest) for kind, *rest in autocast])
        device = self.of(settings.device or CPU)
        if device != (settings.device or CPU):
            settings = with_device(settings, device)
        return grad, inference, kinds, settings


def run_forward(
    segment: Segment,
    on: StageDevice,
    around: Callable[[Segment, StageDevice], contextlib.AbstractContextManager[Any]] | None = None,
    *,
    before: Callable[[Call], None] = lambda call: None,
    chosen: Collection[Call] | None = None,
) -> None:
    """Run the calls of `segment`; its inputs' data is on this rank, its outputs' data will be.

    Args:
        segment: What to run.
        on: Where.
        around: Gives the context in which the calls run, if they need one.
        before: Called with each call that is about to run.
        chosen: Those that run, if not all do.
    """
    is_cast = any(call.region for call in segment.calls)
    for value in segment.inputs:
        is_at_home = bool(value.name) and value.stage == segment.stage  # a parameter, which is used as it is
        if is_at_home or (chosen is not None and value.data is None):  # or what no chosen call needs
            continue
        assert value.data is not None, f"{value.describe()} is not here"
        leaf = value.data.detach()
        leaf = on.brought(leaf, value.meta.device, value.segment)
        if value.meta.requires_grad:
            if is_cast and not value.meta.is_parameter:
                leaf = as_activation(leaf)
            leaf.requires_grad_()
        segment.leaves[value] = leaf
    last_used = _last_used(segment)
    with _NOTHING if around is None else around(segment, on):
        for region, calls in groupby(segment.calls, key=attrgetter("region")):
            with in_region(region):
                for call in calls if chosen is None else [call for call in calls if call in chosen]:
                    before(call)
                    run_call(call, segment, on)
                    for value in last_used.get(call, ()):
                        if not value.is_held:
                            value.data = None
    for value in [value for value in segment.leaves if not value.meta.requires_grad]:
        del segment.leaves[value]


def _last_used(segment: Segment) -> dict[Call, list[Value]]:
    """Returns by call the values inside `segment` that no later call needs: autograd keeps what it needs of them."""
    last: dict[Value, Call] = {}
    for call in segment.calls:
        assert call.arguments is not None
        last.update(dict.fromkeys(call.outputs, call))
        last.update((item, call) for item in call.arguments if type(item) is Value and item.segment is segment)
    found: dict[Call, list[Value]] = {}
    for value, call in last.items():
        if value not in segment.outputs:
            found.setdefault(call, []).append(value)
    return found


def run_call(call: Call, segment: Segment, on: StageDevice) -> None:
    """Run one call; its segment's leaves are there, and its results are to be where the stage has them."""
    entry = call.entry
    assert call.arguments is not None
    if call.versions and plain_versions(call.arguments) != call.versions:
        raise RecordError(
            f"a tensor that was given to {call.entry.name} has been written to since.",
            why=f"the call at {format_where(call.where)} was recorded, and runs only now.",
            hint="give each micro-batch a tensor of its own (batch.clone()), or call farspan.flush() before the write",
        )
    if call.moment.snapshots:
        call.moment.go_to()
    tensors = [_tensor_of(item, segment, on) for item in call.arguments]
    for number, item in [(number, call.arguments[number]) for number in entry.unused]:
        if type(item) is Value:
            tensors[number] = PassedBy.make(item.meta)
    if type(call.target) is Leaf and call.target.has_buffers:
        call.buffers = buffers_before(call, call.target)
    with (
        apply_modes(on.modes(call.modes)),
        seeded(call, tensors) if entry.is_random or getattr(call.target, "is_resolved", False) else _NOTHING,
        _NOTHING if call.saved_hooks is None else under_saved_hooks(call.saved_hooks),
    ):
        for number in entry.mutated:
            tensors[number] = _writable(call.arguments[number], tensors[number], segment)
        try:
            if type(entry) is Unknown:
                resolve_from_run(call, tensors, lambda given: call_target(call, given))
                return
            is_resolved = getattr(call.target, "is_resolved", False)
            results = as_before(call, tensors, _results_of) if is_resolved else _results_of(call, tensors)
            if type(call.target) is not Leaf and call.outputs:
                results = _apart(results, tensors, entry)
        except Exception as error:
            note_line(error, call)
            raise
    results += [*(tensors[number] for number in entry.mutated), *(call.buffers[name] for name in call.buffer_names)]
    if len(results) != len(call.outputs):
        raise RecordError(
            f"{call.entry.name} gave {len(results)} tensors, {len(call.outputs)} were predicted.",
            why=f"at {format_where(call.where)}: it depends on the data, or on state that another rank has.",
            hint="compute it in a module that returns the same structure every time",
        )
    for value, tensor in zip(call.outputs, results, strict=True):
        value.data = _verified(value, tensor, call, on)


def _apart(results: list[torch.Tensor], tensors: list[torch.Tensor], entry: Entry) -> list[torch.Tensor]:
    """Returns the results with a copy of what is an argument here, and would be none in the plain program: that moves
    it to another device, and the stage has it there already."""
    if not any(result is tensor for result in results for tensor in tensors):
        return results
    new = [number for number, same in enumerate(entry.same_as) if same < 0]
    return [result.clone() if number in new else result for number, result in enumerate(results)]


def _results_of(call: Call, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run the call; the tensors of what it returns, and of what it puts into the objects it was given."""
    result, arguments = call_target(call, tensors)
    if not arguments.objects:
        return [result] if type(result) is torch.Tensor else flatten(result)[1]
    described = describe_result(result, arguments.objects, arguments.changed())
    if (described.template, described.changes) != (call.entry.template, call.entry.changes):
        raise RecordError(
            f"{call.entry.name} did something else to its arguments than predicted.",
            why=f"at {format_where(call.where)}: it depends on the data, or on state that another rank has.",
            hint="let the module return what it computes, and let its caller keep it",
        )
    return described.tensors


def call_target(call: Call, tensors: list[torch.Tensor]) -> tuple[Any, MutableArguments]:
    """Call it on copies of the objects among its arguments; its result, and what became of these copies."""
    target = call.target
    if type(target) is not Leaf:
        args, kwargs = rebuild(call.template, tensors)
        return target(*args, **kwargs), _NO_OBJECTS
    num_arguments = len(tensors) - target.num_extra
    is_known = type(call.entry) is not Unknown
    if is_known and num_arguments == len(tensors) and not call.entry.attributes and _is_as_it_was(target):
        plain = plain_arguments(call.template, tensors)
        if plain is not None:
            return nn.Module.__call__(target.module, *plain[0], **plain[1]), _NO_OBJECTS
    args, kwargs, attributes, arguments = rebuild_arguments(call.template, tensors[:num_arguments])
    if is_known and not attributes and not call.entry.attributes:
        if len(arguments.objects) == 1:  # the attributes, of which there are none
            arguments = _NO_OBJECTS
        if num_arguments == len(tensors) and _is_as_it_was(target):
            return nn.Module.__call__(target.module, *args, **kwargs), arguments  # its own `__call__` has run already
    with contextlib.ExitStack() as stack:
        if is_known and target.is_resolved:
            stack.enter_context(unchanged_as_before(target))
        if not is_known:
            stack.enter_context(watched_attributes(target.modules, attributes, is_real=True))
        elif attributes or call.entry.attributes:
            stack.enter_context(real_attributes(target.modules, call.entry.attributes, attributes))
        stack.enter_context(target.holding(tensors[num_arguments:]))
        copies = stack.enter_context(own_versions(target, is_known=is_known))
        if copies and active.units is not None:
            active.units.written.update(map(id, copies))
        stack.enter_context(registering_nothing(call, copies))
        stack.enter_context(without_user_hooks(target.module))
        stack.enter_context(noting_raised(call))
        return nn.Module.__call__(target.module, *args, **kwargs), arguments
    return None, arguments


def _is_as_it_was(leaf: Leaf) -> bool:
    """Returns whether a call of `leaf`, whose metadata is known, needs no versions of its buffers and no watching: its
    tables hold what they held when the leaf was made, and it has no hooks of the program's.
    """
    return (
        not leaf.is_resolved
        and leaf.tables.are_unchanged()
        and not has_user_hooks(leaf.module)
        and not (leaf.has_buffers and versioned(leaf))
    )


def _tensor_of(item: Any, segment: Segment, on: StageDevice) -> torch.Tensor:
    if type(item) is not Value:
        if item.requires_grad:  # it did not when the call was recorded
            item = item.detach()
        place = on.of(item.device)
        return item if item.device == place else item.to(place)
    return segment.leaves.get(item, item.data)


def _writable(item: Any, tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Returns what an in-place call may write into. Others keep the old version."""
    if type(item) is not Value:
        return tensor
    if item in segment.leaves and not item.gradient_of:
        with torch.set_grad_enabled(tensor.requires_grad or torch.is_grad_enabled()):
            return tensor.clone()  # came over a border: not ours alone, and a leaf of autograd
    if item in segment.outputs:
        item.data = tensor.clone()  # the old version is still to be sent, or read
    return tensor


def _verified(value: Value, tensor: torch.Tensor, call: Call, on: StageDevice) -> torch.Tensor:
    """Returns a result, where its stage has it: a call may have named a device.

    Raises:
        RecordError: It is not what was predicted.
    """
    meta, place = value.meta, on.of(value.meta.device)
    is_like_it = tensor.dtype == meta.dtype and tensor.requires_grad == meta.requires_grad
    if is_like_it and tuple(tensor.shape) == meta.shape and tensor.device.type in (meta.device.type, place.type):
        return tensor if tensor.device == place or type(tensor) is PassedBy else tensor.to(place)
    raise RecordError(
        f"{call.entry.name} gave {tensor.dtype}{list(tensor.shape)} on {tensor.device.type} "
        f"(requires_grad={tensor.requires_grad}), predicted was {meta} on {meta.device.type} "
        f"(requires_grad={meta.requires_grad}).",
        why=f"at {format_where(call.where)}: its output depends on the data, or on state that another rank has.",
        hint="compute it in a module that the plan places as a whole",
    )


def run_backward(
    part: BackwardSegment,
    gradients: Mapping[Edge, torch.Tensor | None],
    parameters: Mapping[str, Placed],
    on: StageDevice,
    *,
    leaves_weights: bool,
    before: Callable[[Collection[Any]], None],
) -> tuple[dict[Edge, torch.Tensor | None], Deferred | None]:
    """Run one segment's share of a backward.

    Args:
        part: What to differentiate.
        gradients: For every incoming edge its gradient; None for one that there is not.
        parameters: By name.
        on: Where.
        leaves_weights: Whether gradients of parameters may be deferred.
        before: Called with the accumulators of the parameters that get their gradient now, if some may not.

    Returns:
        The gradient of every outgoing edge, of one run in the order in which autograd has had them; what is deferred.
    """
    roots, seeds = _roots_of(part, gradients, parameters)
    sources = [_source_of(edge, part, parameters) for edge in part.outgoing]
    leaves = list({id(source): source for source, is_native in sources if not is_native}.values())
    own = [source for source, is_native in sources if is_native]  # adding up goes on elsewhere
    split = deferred = None
    if leaves_weights:
        split = split_backward(roots, leaves, own)
        before(split.now)
    # A parameter whose sum goes on to another segment must not be added to what earlier micro-batches left in .grad.
    requested = {name: parameters[name].tensor for name in part.accumulates_into} if part.backward.requested else {}
    natives = {id(item): item for item in [*own, *requested.values()]}
    values = {value: value.data for value in part.requested}
    aside = [(source, raw_grad(source)) for source in natives.values()]
    for source, _ in aside:
        set_raw_grad(source, None)
    watched = [call.target for call in part.calls if getattr(call.target, "runs_code_backward", False)]
    is_packed = any(call.saved_hooks is not None for call in part.calls)
    with caught_at(leaves) as caught, passed_on(part, parameters), holding_foreign(part):
        if part.backward.moment.snapshots:
            part.backward.moment.go_to()
        try:
            with (
                apply_modes(on.modes(part.backward.modes)),
                around_backward(part.describe),
                unchanged_in_backward(watched, part.backward.changes, is_packed=is_packed) if watched else _NOTHING,
            ):
                if split is not None:
                    deferred = split.run_first_half(roots, seeds)
                elif roots:
                    torch.autograd.backward(
                        roots,
                        seeds,
                        retain_graph=part.backward.retain_graph,
                        inputs=[*leaves, *natives.values(), *values.values()] if part.backward.requested else None,
                    )
        except Exception as error:
            modules = dict.fromkeys(call.target.name for call in part.calls if type(call.target) is Leaf)
            note_line_of_backward(error, part.backward.where, part.describe(), list(modules))
            _put_back(aside)
            raise
    outgoing = _outgoing(part, sources, caught)
    _check_passed(part)
    if part.backward.requested is not None:
        shared = {edge.key for edge in part.outgoing}
        returned = {name: raw_grad(source) for name, source in requested.items() if name not in shared}
        part.backward.requested.found.update(returned)
        for value, tensor in values.items():
            part.backward.requested.found[value] = raw_grad(tensor)
            set_raw_grad(tensor, None)
    _put_back(aside)
    if not part.backward.retain_graph:
        _release(part)
    return outgoing, deferred


def _check_passed(part: BackwardSegment) -> None:
    """Raise if gradient has come to what could not get any, for an earlier backward has been through what made it."""
    calls = [call for call in part.calls if type(call.target) is Leaf and call.target.is_resolved]
    if not calls or part.segment is None:
        return
    leaves, passed_on = part.segment.leaves, {edge.key for edge in part.outgoing}
    for call in calls:
        for item in call.arguments or ():
            is_left = type(item) is Value and item in leaves and item not in passed_on
            if is_left and item.call is not None and raw_grad(leaves[item]) is not None:
                raise released_error(item.call)


def _roots_of(
    part: BackwardSegment, gradients: Mapping[Edge, torch.Tensor | None], parameters: Mapping[str, Placed]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Returns the tensors at which the backward begins here, and the gradient of each."""
    segment = part.segment
    roots: list[torch.Tensor] = []
    seeds: list[torch.Tensor | None] = []
    for edge in [edge for edge in part.incoming if gradients[edge] is not None]:
        key = edge.key
        if isinstance(key, str):
            held = () if segment is None else segment.leaves
            leaf = next((_entry(part, value) for value in held if value.name == key), None)
            roots.append(tensor_of(parameters, key) if leaf is None else leaf)
        else:
            roots.append(key.data if key.segment is segment else _entry(part, key))
        seeds.append(gradients[edge])
    stops = () if part.backward.stops is None else part.backward.stops.calls
    for root, seed in zip(part.backward.roots, part.backward.gradients, strict=True):
        if root.segment is segment and root.call not in stops:  # hooks are given the seed first
            roots.append(root.data)
            seeds.append(None if seed is None else seed.to(root.data.device))
    return roots, seeds


def _outgoing(
    part: BackwardSegment, sources: Sequence[tuple[torch.Tensor, bool]], caught: Mapping[int, Any]
) -> dict[Edge, torch.Tensor | None]:
    """Returns the gradient of every outgoing edge, in the order in which autograd has had them, by its source's id;
    None for what a module has not used, as its data decide."""
    outgoing: dict[Edge, torch.Tensor | None] = {}
    number = {leaf_id: number for number, leaf_id in enumerate(caught)}
    found = sorted(zip(part.outgoing, sources, strict=True), key=lambda item: number.get(id(item[1][0]), -1))
    for edge, (source, is_native) in found:
        gradient = raw_grad(source) if is_native else caught.get(id(source))
        if gradient is None and edge.dst.stop is not None:
            raise RecordError(
                f"there is no {edge.describe()}, which has hooks.",
                why=f"in the {part.describe()}: what runs there depends on data, or returns None for a gradient.",
                hint="let the function return zeros, or place its module together with the one before it",
            )
        outgoing[edge] = gradient
    return outgoing


def _put_back(aside: Sequence[tuple[torch.Tensor, Any]]) -> None:
    for source, gradient in aside:
        set_raw_grad(source, gradient)


def _entry(part: BackwardSegment, value: Value) -> torch.Tensor:
    """Returns the tensor at which the gradients of the users of `value` are added up, latest first."""
    assert part.segment is not None
    return part.segment.entries.get(value, part.segment.leaves[value])


def _source_of(edge: Edge, part: BackwardSegment, parameters: Mapping[str, Placed]) -> tuple[torch.Tensor, bool]:
    """Returns the tensor whose .grad will hold what `edge` carries, and whether it is a parameter at home."""
    key = edge.key
    assert part.segment is not None
    if not isinstance(key, str):
        return part.segment.leaves[key], False
    for value, leaf in part.segment.leaves.items():
        if value.name == key:
            return leaf, False
    return parameters[key].tensor, True


def _release(part: BackwardSegment) -> None:
    """Release what only this backward needed."""
    if (segment := part.segment) is None:
        return
    over = set(part.calls)
    for value in [*(edge.key for edge in part.incoming if not isinstance(edge.key, str)), *part.backward.roots]:
        if value.segment is segment and value.call in over:
            _drop(value)
    if all(call in over or not call.entry.requires_grad for call in segment.calls):  # no other backward comes here
        for edge in part.outgoing:
            if not isinstance(edge.key, str) and edge.key.stage != EVERYWHERE:
                segment.leaves.pop(edge.key, None)
                segment.entries.pop(edge.key, None)
        for value in [value for value in segment.leaves if type(value.name) is SliceName]:
            segment.leaves.pop(value)
            segment.entries.pop(value, None)
    for call in part.calls:
        for value in call.outputs:
            if value is not None and value.data is not None and value.data.requires_grad:
                _drop(value)


def _drop(value: Value) -> None:
    """A backward has gone through what made `value`: its data may still be needed, its history is not."""
    is_needed = value.is_held or value.num_readers > 0
    value.data = value.data.detach() if is_needed and value.data is not None else None

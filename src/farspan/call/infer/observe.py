"""Observes one run of a call: structure and metadata of what it gives, and which output depends on which argument."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.buffer_versions import note_saved
from farspan.call.infer.entry import Entry, meta_of, refuse_nested
from farspan.call.infer.watch import (
    Generators,
    Made,
    Watch,
    noted_generators,
    storage_id,
    untouched_by_torch,
    untouched_generators,
)
from farspan.call.leaf import Leaf, LeakError, Placed
from farspan.call.modes import Modes
from farspan.call.naming import is_torchs_own, name_of
from farspan.call.pytree.canonical import digest_of
from farspan.call.pytree.holes import numbers_of
from farspan.call.side_effects.attributes import attributes_sharing
from farspan.call.side_effects.changes import ATTRIBUTES, Described, MutableArguments, describe_result
from farspan.call.side_effects.hidden import generators_held
from farspan.graph import Meta
from farspan.torch_private import (
    goes_through_python,
    history_of,
    is_compiled,
    is_fake,
    is_run_again_inside,
    is_same_generator,
    leaves_behind,
    leaves_with_gradient,
)

if TYPE_CHECKING:
    from farspan.call.leaf import Target
    from farspan.graph import Template

__all__ = ["DynamicShapeError", "Fakes", "Owned", "activation", "aliases", "digest_of_call", "observe"]

Owned = Sequence[tuple[Placed, torch.Tensor]]
"""A leaf's parameters and buffers, each with what stands for it in a run."""


class DynamicShapeError(Exception):
    """The shape of an output depends on data."""


@dataclass(slots=True)
class Fakes:
    """What a run on fakes has, which is not the call itself."""

    owned: Owned = ()
    """Those written into will know, and the buffers that autograd saves."""
    replaced: dict[int, torch.Tensor] = field(default_factory=dict)
    """By id of what stood for a buffer, what stands for it when the call has run, if that is another tensor."""
    made: Made | None = None
    """Takes a weak reference to every tensor that the run makes."""
    outside: Collection[int] = ()
    """Ids of tensors that the run must not reach."""
    in_symbols: bool = False
    """Whether sizes and numbers are symbols, and come out as such."""
    device: torch.device | None = None
    """Where the results are, if torch's formulas for its meta device say what they are."""
    is_watched: bool = True
    """False where nothing that the run does is of interest but its results."""


def observe(
    target: Target,
    template: Template,
    metas: Sequence[Meta],
    modes: Modes,
    leaves: Sequence[torch.Tensor],
    run: Callable[[list[torch.Tensor]], tuple[Any, MutableArguments]],
    fakes: Fakes | None = None,
) -> tuple[Entry, list[torch.Tensor]]:
    """Watch one run of a call; return what it has shown, and the output tensors.

    Args:
        target: What is called.
        template: Of its arguments.
        metas: Of the tensors among them.
        modes: Under which it runs; already applied.
        leaves: The tensors themselves, with nothing behind them in autograd.
        run: Calls it with tensors to use in their place; gives the result, and what became of the argument objects.
        fakes: Of a run on fakes; None if it is the call itself that runs, with all that it does.

    Raises:
        LeakError: A run on fakes has reached what it must not.
        DynamicShapeError: The shape of an output depends on data.
    """
    is_real = fakes is None
    fakes = Fakes() if fakes is None else fakes
    leaf = target if isinstance(target, Leaf) else None
    made = [] if fakes.made is None else fakes.made
    watch = Watch(made, fakes.outside, in_symbols=fakes.in_symbols, is_rehearsal=not is_real)
    with (
        _generators_in(target, is_real=is_real, by_formula=fakes.device is not None) as generators,
        watch if fakes.is_watched else nullcontext(),
    ):
        # Not leaves of autograd, so that a call may write into them, as it may into any activation.
        with torch.enable_grad():
            tensors = [
                activation(item) if meta.requires_grad and not meta.is_parameter else item
                for meta, item in zip(metas, leaves, strict=True)
            ]
        before = list(map(_state_of, tensors))
        held = fakes.owned or [(item, item.tensor) for item in (() if leaf is None else leaf.placed) if item.is_owned]
        memory = [(item, tensor, {storage_id(tensor)}) for item, tensor in held]
        watch.used.clear()
        result, arguments = run(tensors)
        described = describe_result(result, arguments.objects, arguments.changed())
        results = described.tensors
        mutated = _mutated(target, tensors, before, watch)
        outputs = [*results, *(tensors[i] for i in mutated)]
        refuse_nested(*outputs)
        if not fakes.in_symbols and _holds_symbols(described, outputs):
            raise DynamicShapeError
        same_as, shares = aliases(results, tensors)
        with watch.paused():
            find_leaves = leaves_with_gradient if watch.goes_back and not is_real else leaves_behind
            behind = list(map(find_leaves, outputs))
        if leaf is not None and not is_real:
            _check_resolved(leaf, behind)
        depends_on = _dependencies(leaf, metas, leaves, list(zip(outputs, behind, strict=True)), watch)
        if fakes.in_symbols:
            output_metas = tuple(map(_meta_in_symbols, outputs))
        else:
            output_metas = tuple([meta_of(output, fakes.device) for output in outputs])
        histories = tuple(map(history_of, outputs))
        views = tuple([i for i, result in enumerate(results) if shares[i] < 0 and result._is_view()])
        is_ordered = _note_writes(target, memory, outputs, fakes, watch)
        if leaf is not None:
            leaf.runs_code_backward |= watch.is_checkpointed or any(map(goes_through_python, outputs))
        if leaf is not None and watch.own_generators:
            _check_generators(leaf, template, watch.own_generators)
        attributes = list(arguments.objects.get(ATTRIBUTES, ()))
        if leaf is not None and fakes.owned and watch.written_plain:
            attributes += [key for key in _holding(leaf, watch.written_plain) if key not in attributes]
        passed_by = [i for i, tensor in enumerate(tensors) if leaf is not None and storage_id(tensor) not in watch.used]
        parameters = _parameters_behind(leaf, held, list(zip(outputs, behind, strict=True)), watch)
        if leaf is not None and is_real:
            passed_by = [i for i in passed_by if not metas[i].is_parameter]  # an attribute that is replaced is no input
            depends_on, parameters = _all_that_may_be(leaf, metas, output_metas, passed_by)
    result_parts = (described.template, output_metas, described.changes)
    has_own_draws = not (is_real or generators.were_seeded or _holds_compiled(target))
    entry = Entry(
        name=name_of(target),
        template=described.template,
        changes=described.changes,
        names_arguments=described.names_arguments,
        unused=frozenset(passed_by),
        attributes=tuple(attributes),
        metas=output_metas,
        num_results=len(results),
        depends_on=depends_on,
        parameters=parameters,
        mutated=mutated,
        same_as=same_as,
        shares=shares,
        has_tensors_only=_has_tensors_only(result),
        is_one_new_tensor=isinstance(result, torch.Tensor)
        and not mutated
        and not described.changes
        and same_as[0] < 0
        and shares[0] < 0,
        is_random=watch.has_drawn or generators.have_drawn or generators.has_torch_drawn,
        is_random_in_python=generators.have_drawn,
        is_ordered=is_ordered,
        flops=watch.flops,
        digest=digest_of_call(target, template, metas, modes, result_parts),
        histories=histories,
        views=views,
        draws=watch.draws() if has_own_draws else None,
    )
    return entry, outputs


def _generators_in(target: Target, *, is_real: bool, by_formula: bool) -> AbstractContextManager[Generators]:
    """Returns what notes the use of generators in a run of `target`, and leaves them alone in one that is not real."""
    if by_formula:
        return nullcontext(Generators())
    if is_real:
        return noted_generators()
    return untouched_by_torch() if is_torchs_own(target) else untouched_generators()


def digest_of_call(target: Target, template: Template, metas: Sequence[Meta], modes: Modes, result_parts: Any) -> int:
    """Returns what is equal on all ranks for equal calls, however a rank has found out what they give.

    Args:
        target: What is called.
        template: Of its arguments.
        metas: Of the tensors among them.
        modes: Under which it runs.
        result_parts: The template of its result, the metadata of its outputs, and its changes.
    """
    flags = target.flags if isinstance(target, Leaf) else None
    return digest_of((name_of(target), template, metas, modes, flags, result_parts))


def activation(leaf: torch.Tensor) -> torch.Tensor:
    """Returns a tensor like `leaf`, strides and all, that is no leaf of autograd."""
    copy = leaf.clone()
    return copy if copy.stride() == leaf.stride() else _Alias.apply(leaf)  # a copy of a slice is no slice


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes when a tensor is written into, or gets other memory; one of inference mode does not count its writes."""
    return 0 if tensor.is_inference() else tensor._version, storage_id(tensor)


def _mutated(
    target: Target, tensors: Sequence[torch.Tensor], before: Sequence[tuple[int, int]], watch: Watch
) -> tuple[int, ...]:
    """Returns the numbers of the arguments that have been written into, of which `_state_of` was `before`."""
    written = watch.written | watch.updated if type(target) is Leaf else watch.written
    return tuple(
        i for i, tensor in enumerate(tensors) if _state_of(tensor) != before[i] or storage_id(tensor) in written
    )


def aliases(
    results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns for each result the argument that it is, and the argument with whose memory it is; -1 for none."""
    positions = {id(tensor): i for i, tensor in enumerate(tensors)}
    storages = {storage_id(tensor): i for i, tensor in enumerate(tensors)}
    same_as = tuple(positions.get(id(tensor), -1) for tensor in results)
    return same_as, tuple(storages.get(storage_id(tensor), -1) for tensor in results)


def _dependencies(
    leaf: Leaf | None,
    metas: Sequence[Meta],
    leaves: Sequence[torch.Tensor],
    outputs: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]],
    watch: Watch,
) -> tuple[tuple[int, ...], ...]:
    """Returns for each output, given with the leaves of autograd behind it, which of the `leaves` it depends on."""
    leaf_numbers = {id(item): i for i, item in enumerate(leaves)}
    numbers = [{leaf_numbers[id(item)] for item in behind if id(item) in leaf_numbers} for _, behind in outputs]
    if leaf is not None and leaf.foreign:
        for found, (output, _) in zip(numbers, outputs, strict=True):
            if is_run_again_inside(output):
                used = [i for i, meta in enumerate(metas) if meta.requires_grad and meta.is_parameter]
                found.update(i for i in used if storage_id(leaves[i]) in watch.used)
    return tuple([tuple(sorted(found)) for found in numbers])


def _parameters_behind(
    leaf: Leaf | None,
    held: Sequence[tuple[Placed, torch.Tensor]],
    outputs: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]],
    watch: Watch,
) -> tuple[tuple[int, ...], ...]:
    """Returns for each output, given with the leaves of autograd behind it, which parameters its gradient may flow to:
    of an output whose graph does not show all, each that the call has used.
    """
    if leaf is None:
        return ((),) * len(outputs)
    places = {id(item): number for number, item in enumerate(leaf.placed)}
    used = {
        id(tensor): places[id(item)] for item, tensor in held if item.is_trained and storage_id(tensor) in watch.used
    }
    found = [
        used.values() if goes_through_python(output) else [used[id(item)] for item in behind if id(item) in used]
        for output, behind in outputs
    ]
    return tuple([tuple(sorted(numbers)) for numbers in found])


def _all_that_may_be(
    leaf: Leaf, metas: Sequence[Meta], outputs: Sequence[Meta], unused: Sequence[int]
) -> tuple[Any, Any]:
    """Returns for each output the arguments, and the parameters, to which its gradient may flow where data decide that:
    another run may take gradient through what this one has only looked at.
    """
    arguments = tuple([i for i, meta in enumerate(metas) if meta.requires_grad and i not in unused])
    parameters = tuple([i for i, item in enumerate(leaf.placed) if item.is_trained and item.stage == leaf.stage])
    return (
        tuple([arguments if meta.requires_grad else () for meta in outputs]),
        tuple([parameters if meta.requires_grad else () for meta in outputs]),
    )


def _note_writes(
    target: Target,
    memory: Sequence[tuple[Placed, torch.Tensor, set[int]]],
    outputs: Sequence[torch.Tensor],
    fakes: Fakes,
    watch: Watch,
) -> bool:
    """Let parameters and buffers know that they are written into; return whether calls have to keep their order for it.

    Args:
        target: What has run.
        memory: Its parameters and buffers, each with what stood for it, and the storages that it has had: those that it
            has now are added.
        outputs: Of the run.
        fakes: Of the run.
        watch: Of the run.
    """
    is_ordered = False
    for item, tensor, ids in memory:
        ids.add(storage_id(fakes.replaced.get(id(tensor), tensor)))  # another one where its `.data` have been set
        is_written = len(ids) > 1 or not ids.isdisjoint(watch.written | watch.updated)
        item.is_written |= is_written and bool(fakes.owned)
        is_ordered |= is_written and item.is_parameter and item.stage == target.stage
    if fakes.owned:
        is_ordered |= note_saved(outputs, [(item, ids) for item, _, ids in memory])
    return is_ordered


def _check_resolved(leaf: Leaf, behind: Sequence[Sequence[torch.Tensor]]) -> None:
    """Raise if gradients of a run on fakes flow to anything but fakes: to a parameter among the globals, or in a list.

    Raises:
        LeakError: It would get its gradient at the owner only.
    """
    for tensor in [tensor for found in behind for tensor in found]:
        if not is_fake(tensor):
            raise LeakError(f"{name_of(leaf)} uses a tensor outside itself that requires grad")


def _check_generators(leaf: Leaf, template: Template, drawn_from: Sequence[torch.Generator]) -> None:
    """Raise if a call draws from a generator of the program's.

    Raises:
        LeakError: It would be moved on at the owner only.
    """
    held = generators_held(leaf.modules, template)
    if any(is_same_generator(one, other) for one in held for other in drawn_from):
        raise LeakError(f"{name_of(leaf)} draws from a generator that every rank has")


def _holds_compiled(target: Target) -> bool:
    """Returns whether a real run draws in code that torch.compile has made, which draws differently."""
    return type(target) is Leaf and any(map(is_compiled, target.modules))


def _holding(leaf: Leaf, written: Mapping[int, torch.Tensor]) -> list[str]:
    """Returns the attributes of a leaf's modules that hold tensors it writes, or others that share their memory.

    Raises:
        LeakError: Something else holds one.
    """
    found: list[str] = []
    for tensor in written.values():
        keys = attributes_sharing(leaf.modules, tensor)
        if not keys:
            raise LeakError(f"{name_of(leaf)} writes into a tensor outside itself")
        found += [key for key in keys if key not in found]
    return found


def _holds_symbols(described: Described, outputs: Sequence[torch.Tensor]) -> bool:
    numbers: list[Any] = [size for output in outputs for size in output.shape]
    numbers_of((described.template, described.changes), numbers)
    return any(isinstance(number, torch.SymInt) for number in numbers)


def _has_tensors_only(result: Any) -> bool:
    if isinstance(result, torch.Tensor) or result is None:
        return True
    if isinstance(result, (bool, int, float, complex, torch.SymInt)) or type(result).__module__ == "numpy":
        return False
    if isinstance(result, dict):
        return all(map(_has_tensors_only, result.values()))
    if isinstance(result, (list, tuple)) and not isinstance(result, torch.Size):
        return all(map(_has_tensors_only, result))
    return True


def _meta_in_symbols(tensor: torch.Tensor) -> Meta:
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    return Meta(tuple(tensor.shape), tuple(stride), tensor.dtype, tensor.device, tensor.requires_grad)

"""Predicting a call: one run on fake tensors gives structure, metadata, and which output depends on which argument."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from farspan.call.autograd_reach import out_of_autograds_reach
from farspan.call.buffer_versions import note_saved
from farspan.call.draws.drawing_functions import DRAWS
from farspan.call.function_call import FunctionCall
from farspan.call.infer.entry import Entry, meta_of, refuse_nested
from farspan.call.infer.watch import Made, NoteFunction, Watch, noted_generators, storage_id, untouched_generators
from farspan.call.leaf import Leaf, LeakError, Placed
from farspan.call.modes import Modes, apply_modes
from farspan.call.naming import name_of
from farspan.call.pytree.canonical import digest_of
from farspan.call.pytree.holes import numbers_of
from farspan.call.pytree.template import rebuild
from farspan.call.side_effects.attributes import attributes_sharing, watched_attributes
from farspan.call.side_effects.changes import (
    ATTRIBUTES,
    Described,
    MutableArguments,
    describe_result,
    rebuild_arguments,
)
from farspan.call.side_effects.hidden import generators_held
from farspan.call.side_effects.registered import Registered, torch_tables_kept
from farspan.call.surroundings.around import nothing_changed_around
from farspan.call.user_hooks import without_user_hooks
from farspan.graph import Meta
from farspan.torch_private import (
    SYMBOLS,
    Symbols,
    call_without_compiling,
    compiling_nothing,
    forget_casts,
    history_of,
    is_compiled,
    is_fake,
    is_run_again_inside,
    is_same_generator,
    leaves_behind,
    on_fakes,
)

if TYPE_CHECKING:
    from farspan.call.leaf import Target
    from farspan.graph import Template

__all__ = ["DynamicShapeError", "observe", "predict"]

Owned = Sequence[tuple[Placed, torch.Tensor]]
_NOTHING: Mapping[int, torch.Tensor] = MappingProxyType({})


class DynamicShapeError(Exception):
    """The shape of an output depends on data."""


def predict(
    target: Target,
    template: Template,
    metas: Sequence[Meta],
    modes: Modes,
    *,
    is_symbolic: bool = False,
    symbols: Symbols | None = None,
    made: Made | None = None,
    outside: Collection[int] = (),
) -> Entry:
    """Run `target` once on fake tensors.

    Args:
        is_symbolic: Let sizes that depend on data be symbols, as long as none comes out.
        symbols: Of those sizes and numbers in `template` and `metas` that are symbols. They come out.
        made: Takes a weak reference to every tensor that the run makes.
        outside: Ids of tensors that the run must not reach; fakes stand for those it may.

    Raises:
        LeakError: It has reached one.
        DynamicShapeError: The shape of an output depends on data.
        Whatever the call raises on such arguments, or torch because there are no data.
    """
    with (
        SYMBOLS if is_symbolic or symbols is not None else nullcontext(),
        _no_casts_left(),
        compiling_nothing(),
        torch.inference_mode(False),
        on_fakes(is_symbolic=is_symbolic, symbols=symbols),
        apply_modes(modes),
    ):
        leaves = [_fake(meta) for meta in metas]
        owned = _fakes_of(target)
        replaced: dict[int, torch.Tensor] = {}
        entry = observe(
            target,
            template,
            metas,
            modes,
            leaves,
            lambda tensors: _run(target, template, tensors, owned, replaced),
            owned=owned,
            replaced=replaced,
            made=made,
            outside=outside,
            meta_of=meta_of if symbols is None else _meta_in_symbols,
        )
        if entry.is_random and symbols is None:
            _find_draws(target, template, metas)
    return entry


@contextmanager
def _no_casts_left() -> Iterator[None]:
    """Drops what autocast has cast of the fakes, which would stay until the program leaves its region."""
    try:
        yield
    finally:
        forget_casts()


def observe(
    target: Target,
    template: Template,
    metas: Sequence[Meta],
    modes: Modes,
    leaves: Sequence[torch.Tensor],
    run: Callable[[list[torch.Tensor]], tuple[Any, MutableArguments]],
    *,
    keep: Callable[[list[torch.Tensor]], None] = lambda results: None,
    owned: Owned = (),
    replaced: Mapping[int, torch.Tensor] = _NOTHING,
    made: Made | None = None,
    outside: Collection[int] = (),
    meta_of: Callable[[torch.Tensor], Meta] = meta_of,
    is_real: bool = False,
) -> Entry:
    """Watch one run of a call.

    Args:
        target: What is called.
        template: Of its arguments.
        metas: Of the tensors among them.
        modes: Under which it runs; already applied.
        leaves: The tensors themselves, with nothing behind them in autograd.
        run: Calls it with tensors to use in their place; gives the result, and what became of the argument objects.
        keep: Is given the output tensors.
        owned: The leaf's parameters and buffers, each with what stands for it in the run: those written into will know,
            and the buffers that autograd saves.
        replaced: By id of what stood for a buffer, what stands for it when the call has run, if that is another tensor.
        made: Takes a weak reference to every tensor that the run makes.
        outside: Ids of tensors that the run must not reach.
        meta_of: Describes an output.
        is_real: Whether it is the call itself that runs, with all that it does.
    """
    around = noted_generators if is_real else untouched_generators
    in_symbols = meta_of is _meta_in_symbols
    with around() as generators, Watch([] if made is None else made, outside, in_symbols=in_symbols) as watch:
        # Not leaves of autograd, so that a call may write into them, as it may into any activation.
        with torch.enable_grad():
            tensors = [
                _activation(leaf) if meta.requires_grad and not meta.is_parameter else leaf
                for meta, leaf in zip(metas, leaves, strict=True)
            ]
        before = [(tensor._version, storage_id(tensor)) for tensor in tensors]
        is_leaf = isinstance(target, Leaf)
        held = owned or [(item, item.tensor) for item in (target.placed if is_leaf else ()) if item.is_owned]
        memory = [(item, tensor, {storage_id(tensor)}) for item, tensor in held]
        watch.used.clear()
        result, arguments = run(tensors)
        described = describe_result(result, arguments.objects, arguments.changed())
        results = described.tensors
        mutated = tuple(
            i
            for i, tensor in enumerate(tensors)
            if (tensor._version, storage_id(tensor)) != before[i]
            or storage_id(tensor) in watch.written
            or (type(target) is Leaf and storage_id(tensor) in watch.updated)
        )
        outputs = [*results, *(tensors[i] for i in mutated)]
        refuse_nested(*outputs)
        if not in_symbols and _holds_symbols(described, outputs):
            raise DynamicShapeError
        positions = {id(tensor): i for i, tensor in enumerate(tensors)}
        storages = {storage_id(tensor): i for i, tensor in enumerate(tensors)}
        same_as = tuple(positions.get(id(tensor), -1) for tensor in results)
        shares = tuple(storages.get(storage_id(tensor), -1) for tensor in results)
        leaf_numbers = {id(leaf): i for i, leaf in enumerate(leaves)}
        behind = [leaves_behind(output) for output in outputs]
        if is_leaf and not is_real:
            _check_resolved(target, behind)
        numbers = [{leaf_numbers[id(item)] for item in found if id(item) in leaf_numbers} for found in behind]
        if is_leaf and target.foreign:
            for found, output in zip(numbers, outputs, strict=True):
                if is_run_again_inside(output):
                    used = [i for i, meta in enumerate(metas) if meta.requires_grad and meta.is_parameter]
                    found.update(i for i in used if storage_id(leaves[i]) in watch.used)
        depends_on = tuple([tuple(sorted(found)) for found in numbers])
        output_metas = tuple(meta_of(output) for output in outputs)
        histories = tuple(map(history_of, outputs))
        is_ordered = False
        for item, tensor, ids in memory:
            ids.add(storage_id(replaced.get(id(tensor), tensor)))  # another one where its `.data` have been set
            is_written = len(ids) > 1 or not ids.isdisjoint(watch.written | watch.updated)
            item.is_written |= is_written and bool(owned)
            is_ordered |= is_written and item.is_parameter and item.stage == target.stage
        if owned:
            is_ordered |= note_saved(outputs, [(item, ids) for item, _, ids in memory])
        if is_leaf and watch.own_generators:
            _check_generators(target, template, watch.own_generators)
        attributes = list(arguments.objects.get(ATTRIBUTES, ()))
        if is_leaf and owned and watch.written_plain:
            attributes += [key for key in _holding(target, watch.written_plain) if key not in attributes]
        passed_by = [i for i, tensor in enumerate(tensors) if is_leaf and storage_id(tensor) not in watch.used]
        places = {id(item): number for number, item in enumerate(target.placed)} if is_leaf else {}
        unused_parameters = [places[id(item)] for item, tensor in held if storage_id(tensor) not in watch.used]
    keep(outputs)
    name, flags = name_of(target), target.flags if is_leaf else None
    result_parts = (described.template, output_metas, described.changes)
    return Entry(
        name=name,
        template=described.template,
        changes=described.changes,
        names_arguments=described.names_arguments,
        unused=frozenset(passed_by),
        unused_parameters=frozenset(unused_parameters),
        attributes=tuple(attributes),
        metas=output_metas,
        num_results=len(results),
        depends_on=depends_on,
        mutated=mutated,
        same_as=same_as,
        shares=shares,
        has_tensors_only=_has_tensors_only(result),
        is_one_new_tensor=(
            isinstance(result, torch.Tensor)
            and not mutated
            and not described.changes
            and same_as[0] < 0
            and shares[0] < 0
        ),
        is_random=watch.has_drawn or generators.have_drawn or generators.has_torch_drawn,
        is_random_in_python=generators.have_drawn,
        is_ordered=is_ordered,
        flops=watch.flops,
        digest=digest_of((name, template, metas, modes, flags, result_parts)),
        histories=histories,
        draws=watch.draws() if not (is_real or generators.were_seeded or _holds_compiled(target)) else None,
    )


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


def _activation(leaf: torch.Tensor) -> torch.Tensor:
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


def _fake(meta: Meta) -> torch.Tensor:
    tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
    return tensor.requires_grad_(meta.requires_grad) if meta.requires_grad else tensor


def _meta_in_symbols(tensor: torch.Tensor) -> Meta:
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    return Meta(tuple(tensor.shape), tuple(stride), tensor.dtype, tensor.device, tensor.requires_grad)


def _holds_symbols(described: Described, outputs: Sequence[torch.Tensor]) -> bool:
    numbers: list[Any] = [size for output in outputs for size in output.shape]
    numbers_of((described.template, described.changes), numbers)
    return any(isinstance(number, torch.SymInt) for number in numbers)


def _fakes_of(target: Target) -> Owned:
    """Returns a leaf's parameters and buffers, each with a tensor that stands for it."""
    fakes: list[tuple[Placed, torch.Tensor]] = []
    for item in target.placed if type(target) is Leaf else ():
        fake = torch.empty_strided(item.meta.shape, item.meta.stride, dtype=item.meta.dtype, device=item.meta.device)
        fakes.append((item, nn.Parameter(fake, item.tensor.requires_grad) if item.is_parameter else fake))
    return fakes


def _run(
    target: Target, template: Template, tensors: list[torch.Tensor], owned: Owned, replaced: dict[int, torch.Tensor]
) -> tuple[Any, MutableArguments]:
    """Call `target`; its result, and what it did to the objects it was given. See `observe` for `replaced`."""
    if type(target) is not Leaf:
        args, kwargs = rebuild(template, tensors)
        return target(*args, **kwargs), MutableArguments({})
    num_arguments = len(tensors) - target.num_extra
    extra = tensors[num_arguments:]
    args, kwargs, attributes, arguments = rebuild_arguments(template, tensors[:num_arguments])
    with (
        nothing_changed_around(target.modules),
        torch_tables_kept(target.modules),
        watched_attributes(target.modules, attributes, is_real=False),
        target.holding(extra, {id(item.tensor): fake for item, fake in owned}),
        without_user_hooks(target.module),
        out_of_autograds_reach(),
    ):
        registered = Registered(
            target.modules, name_of(target), {id(fake) for item, fake in owned if not item.is_parameter}
        )
        result = call_without_compiling(target.module, *args, **kwargs)
        replaced.update(registered.check())
        return result, arguments


def _find_draws(target: Target, template: Template, metas: Sequence[Meta]) -> None:
    """Run `target` once more, to learn which torch functions it draws with."""
    if type(target) is not Leaf and type(target) is not FunctionCall:
        DRAWS.add(target)
        return
    with torch.enable_grad():
        tensors = [_fake(meta) if meta.is_parameter else _activation(_fake(meta)) for meta in metas]
    # What the function mode breaks here teaches nothing; the call itself has run.
    with untouched_generators(), Watch([], ()) as watch, NoteFunction(watch), suppress(Exception):
        _run(target, template, tensors, _fakes_of(target), {})


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

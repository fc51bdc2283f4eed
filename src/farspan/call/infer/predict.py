"""Predicting a call: one run on fake tensors gives structure, metadata, and which output depends on which argument."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.autograd_reach import out_of_autograds_reach
from farspan.call.draws.drawing_functions import DRAWS
from farspan.call.function_call import FunctionCall
from farspan.call.infer.entry import Entry
from farspan.call.infer.formulas import PRODUCTS, device_of_formula
from farspan.call.infer.observe import Fakes, Owned, activation, observe
from farspan.call.infer.watch import Made, NoteFunction, Watch, untouched_generators
from farspan.call.leaf import Leaf, Placed
from farspan.call.modes import Modes, apply_modes
from farspan.call.naming import name_of
from farspan.call.pytree.template import rebuild
from farspan.call.side_effects.attributes import watched_attributes
from farspan.call.side_effects.changes import MutableArguments, rebuild_arguments
from farspan.call.side_effects.registered import Registered, torch_tables_kept
from farspan.call.side_effects.rehearsal import rehearsed
from farspan.call.surroundings.around import nothing_changed_around
from farspan.call.user_hooks import without_user_hooks
from farspan.graph import Meta
from farspan.torch_private import (
    SYMBOLS,
    Symbols,
    become_parameter,
    call_without_compiling,
    compiling_nothing,
    fake_tensor,
    forget_casts,
    on_fakes,
)

if TYPE_CHECKING:
    from farspan.call.leaf import Target
    from farspan.graph import Template

__all__ = ["fake_like", "fake_of", "no_casts_left", "predict"]


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
    """Run `target` once on fake tensors, or by formula.

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
    if symbols is None and (device := device_of_formula(target, template, metas, modes)) is not None:
        with suppress(Exception):  # of a wrong call, and of what has no formula, fakes tell what there is to tell
            return _by_formula(target, template, metas, modes, device)
    with (
        SYMBOLS if is_symbolic or symbols is not None else nullcontext(),
        no_casts_left(),
        compiling_nothing(),
        torch.inference_mode(False),
        on_fakes(is_symbolic=is_symbolic, symbols=symbols),
        apply_modes(modes),
    ):
        leaves = [fake_like(meta) for meta in metas]
        owned = _fakes_of(target)
        fakes = Fakes(owned, made=made, outside=outside, in_symbols=symbols is not None)

        def run(tensors: list[torch.Tensor]) -> tuple[Any, MutableArguments]:
            return _run(target, template, tensors, owned, fakes.replaced)

        entry = observe(target, template, metas, modes, leaves, run, fakes)[0]
        if entry.is_random and symbols is None:
            _find_draws(target, template, metas)
    return entry


def _by_formula(target: Target, template: Template, metas: Sequence[Meta], modes: Modes, device: torch.device) -> Entry:
    """Run a function of torch's on its meta device, as if it were on `device`."""
    with torch.inference_mode(False), apply_modes(modes):
        leaves = [fake_like(meta, device="meta") for meta in metas]

        def run(tensors: list[torch.Tensor]) -> tuple[Any, MutableArguments]:
            return _run(target, template, tensors, (), {})

        fakes = Fakes(device=device, is_watched=target in PRODUCTS)
        return observe(target, template, metas, modes, leaves, run, fakes)[0]


@contextmanager
def no_casts_left() -> Iterator[None]:
    """Drops what autocast has cast of the fakes, which would stay until the program leaves its region."""
    try:
        yield
    finally:
        forget_casts()


def fake_like(meta: Meta, device: Any = None) -> torch.Tensor:
    """Returns a tensor with this metadata, or on another `device`; fake where it is called among fakes."""
    tensor = fake_tensor(meta.shape, meta.stride, meta.dtype, device or meta.device)
    return tensor.requires_grad_(meta.requires_grad) if meta.requires_grad else tensor


def _fakes_of(target: Target) -> Owned:
    """Returns a leaf's parameters and buffers, each with a tensor that stands for it."""
    return [(item, fake_of(item)) for item in (target.placed if type(target) is Leaf else ())]


def fake_of(item: Placed) -> torch.Tensor:
    """Returns a tensor that stands for a parameter or buffer."""
    tensor = fake_tensor(item.meta.shape, item.meta.stride, item.meta.dtype, item.meta.device)
    return become_parameter(tensor, requires_grad=item.tensor.requires_grad) if item.is_parameter else tensor


def _run(
    target: Target, template: Template, tensors: list[torch.Tensor], owned: Owned, replaced: dict[int, torch.Tensor]
) -> tuple[Any, MutableArguments]:
    """Call `target`; its result, and what it did to the objects it was given. See `Fakes` for `replaced`."""
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
        result = rehearsed(call_without_compiling, target.module, *args, **kwargs)
        replaced.update(registered.check())
        return result, arguments


def _find_draws(target: Target, template: Template, metas: Sequence[Meta]) -> None:
    """Run `target` once more, to learn which torch functions it draws with."""
    if type(target) is not Leaf and type(target) is not FunctionCall:
        DRAWS.add(target)
        return
    with torch.enable_grad():
        tensors = [fake_like(meta) if meta.is_parameter else activation(fake_like(meta)) for meta in metas]
    # What the function mode breaks here teaches nothing; the call itself has run.
    with untouched_generators(), Watch([], ()) as watch, NoteFunction(watch), suppress(Exception):
        _run(target, template, tensors, _fakes_of(target), {})

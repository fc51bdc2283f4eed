"""`x.data`, and `x.data = value`: x gets the memory of value, and who shared its memory before keeps that.

a = p.data             a, p:  old memory
p.data = v             p, v:  memory of v            a:  old memory
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.infer.entry import intern
from farspan.call.pytree.template import flatten_arguments
from farspan.graph import Meta, Value
from farspan.record.memory.exchanged import become_plain, can_be_recorded, exchange
from farspan.record.memory.of_gradients.gradient_memory import Way, way_of
from farspan.record.memory.twins import become_twin, leave_memory, main_of, make_twin, members, twins_of
from farspan.record.ops.views import is_shared, retake, root_of, taken
from farspan.record.parameters.away import AwayParameter, real_of
from farspan.record.parameters.gradient_property import recorder_of
from farspan.record.parameters.parameter_values import alias_of, renew_aliases_of
from farspan.record.tensor import LazyTensor
from farspan.record.unrecorded import plainly
from farspan.torch_private import DisableTorchFunction, without_modes_of

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.record.recording import Recording

__all__ = ["data_of", "set_data", "set_memory"]

_set_memory: Any = torch.Tensor.set_


def data_of(recorder: Recording, function: Any, args: Any, kwargs: Any) -> Any:
    """`param.data`, `param.detach()`: the same memory without gradient, for reading and writing."""
    tensor = args[0]
    if getattr(tensor, "_is_gradient", False):
        return make_twin(tensor)
    placed = recorder.placed.get(id(tensor)) or getattr(tensor, "_alias_of", None)
    if placed is None:
        return NotImplemented
    recorder.before_read(placed.tensor)
    is_counted = function is torch.Tensor.detach and (type(tensor) is not LazyTensor or tensor._is_counted)
    lazy = LazyTensor.make(alias_of(placed, is_counted=is_counted), recorder)
    _become_alias(lazy, placed, is_counted=is_counted)
    return lazy


def set_data(recorder: Recording, function: Any, args: Any, kwargs: Any) -> None:
    """`x.data = value`."""
    tensor, value = args
    recorder.deferred.record_one(tensor)
    recorder.deferred.record_one(value)
    placed = recorder.placed.get(id(tensor))
    if value is tensor or (placed is not None and _parameter_of(recorder, value) is placed):
        return
    if placed is not None:
        recorder.splitting.matrices.owned.need_whole(placed, "gets other data")
        _check_like(recorder, placed.name, tensor, value)
        _check_layout(recorder, placed, value)
        _rebind_parameter(recorder, placed, value)
    elif type(tensor) is not LazyTensor:
        _rebind_plain(recorder, tensor, value)
    elif tensor._is_gradient and tensor._twin_of is None:
        _check_like(recorder, "a gradient", tensor, value)
        _rebind_gradient(recorder, tensor, value)
    else:
        _rebind_recorded(recorder, tensor, value)


def set_memory(parameter: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `parameter.set_`, which no function mode sees: `p.set_(x)` does what `p.data = x` does."""
    recorder = recorder_of(parameter)
    if recorder is None or not recorder.is_recording:
        return _set_memory(parameter, *args, **kwargs)
    source = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(source, torch.Tensor):
        recorder.refuse(
            f"{recorder.placed[id(parameter)].name}.set_(...) with a storage, a size or strides cannot be recorded",
            hint="parameter.data.copy_(value)",
        )
    with without_modes_of(recorder):
        set_data(recorder, _set_memory, (parameter, source), {})
    return parameter


def _check_like(recorder: Recording, name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
    if value.dtype != tensor.dtype or value.shape != tensor.shape:
        recorder.refuse(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and cannot "
            f"become {value.dtype} of shape {tuple(value.shape)}",
            hint="convert the model before farspan.distribute(model)",
        )


def _check_layout(recorder: Recording, placed: Placed, value: torch.Tensor) -> None:
    """Raises where the memory of a parameter would get another order of dimensions: results of calls are in an order
    that follows theirs, and sums are made in another order."""
    given = value._value.meta.stride if type(value) is LazyTensor else value.stride()
    sizes = placed.meta.shape
    if 0 in sizes or all(a == b for n, a, b in zip(sizes, given, placed.meta.stride, strict=True) if n > 1):
        return
    is_like_images = len(sizes) in (4, 5)
    recorder.refuse(
        f"{placed.name}.data = ... would give it another memory layout",
        why=f"its strides are {tuple(placed.meta.stride)}, those of what it is given {tuple(given)}.",
        hint="model.to(memory_format=torch.channels_last) before farspan.distribute(model)"
        if is_like_images
        else f"{placed.name}.data.copy_(value), or value.contiguous()",
    )


def _parameter_of(recorder: Recording, tensor: torch.Tensor) -> Placed | None:
    """Returns the parameter whose memory `tensor` is."""
    return recorder.placed.get(id(tensor)) or getattr(tensor, "_alias_of", None)


def _become_alias(lazy: LazyTensor, placed: Placed, *, is_counted: bool = False) -> None:
    lazy._alias_of, lazy._is_counted = placed, is_counted
    _join(placed.aliases, lazy)


def _join(references: Any, lazy: LazyTensor) -> None:
    if len(references) > 32:
        references[:] = [item for item in references if item() is not None]
    references.append(weakref.ref(lazy))


# Parameters.


def _rebind_parameter(recorder: Recording, placed: Placed, value: torch.Tensor) -> None:
    other = _parameter_of(recorder, value)
    if other is not None:
        recorder.refuse(
            f"{placed.name}.data = ... would let it share its memory with {other.name}",
            hint=f"copy: {placed.name}.data.copy_(value), or tie them before farspan.distribute(model)",
        )
    reason = f"{placed.name}.data = ..."
    _let_be_plain(recorder, value)
    moved: Any = value
    is_lazy = type(value) is LazyTensor
    keeps_memory = not is_lazy or (value._view is None and value._value.stage == placed.stage)
    if not keeps_memory:
        with torch.no_grad():
            moved = _copied_to(recorder, value, placed.stage)
    if recorder.has_pending():
        recorder.engine.flush(reason)
    left = recorder.copies.leave(placed)
    recorder.engine.barrier(reason)  # a slower rank may still read what is about to change
    recorder.engine.groups.begin_write(reason, [placed.name])
    recorder.copies.stay_with(left, _keep_old_memory(recorder, placed))
    if is_lazy:
        data: Any = moved._value.data
        main = main_of(value)  # type: ignore[arg-type]
        _become_parameter(main, placed)
        recorder.copies.come_with(main, placed)
    else:
        main = None
        data = _given_up(recorder, value, placed)
    if placed.is_owned and type(placed.tensor) is not AwayParameter:  # what is away is set at its home
        _put_memory(placed, data)
    recorder.engine.groups.end_write()
    recorder.engine.parameters_changed([placed])
    recorder.parameter_values.set_at[placed.name] = recorder.current.index
    renew_aliases_of(placed)
    for member in members(main) if main is not None else ():
        if not keeps_memory or member._view.links is not None:  # it may have been computed apart from that memory
            retake(recorder, member)
    if type(value) is torch.Tensor and not is_lazy:  # it could not be given up: others use its memory
        recorder.copies.add_part(value, placed)


def _let_be_plain(recorder: Recording, value: torch.Tensor) -> None:
    """Let a part of a recorded tensor, that tensor and all its other parts be plain tensors of one memory, which every
    rank has: parameters that are set to parts of one tensor lie on different ranks. What needs gradient stays as it
    is."""
    root: Any = root_of(value) if type(value) is LazyTensor and main_of(value)._view is not None else None
    if type(root) is not LazyTensor or root._is_gradient or root._is_torn or root._alias_of:
        return
    parts = members(root)
    if any(part._view.links is None for part in parts) or root._parts_of_gradients is not None:
        return
    known = [(part, part._view.links if part._view else ()) for part in (root, *parts) if not part.requires_grad]
    found = [(lazy, links) for part, links in known for lazy in (part, *twins_of(part))]
    known_memory = recorder.copies.take_memory(root)
    memory = root.read().detach().clone() if known_memory is None else known_memory
    with plainly(recorder), torch.no_grad():
        plain = [taken(links, memory) if links else memory.detach() for _, links in found]
    root._family = None
    for lazy, _ in found:
        lazy._value.lazy = None
        lazy._twins = lazy._twin_of = lazy._view = None
        lazy._value = Value(lazy._value.meta, lazy._value.stage)
    for (lazy, _), each in zip(found, plain, strict=True):
        become_plain(recorder, lazy, each)


def _copied_to(recorder: Recording, value: torch.Tensor, stage: int) -> Any:
    given = ((value,), {})
    template, tensors = flatten_arguments(*given)
    return recorder.record(torch.clone, template, tensors, stage, given=given)


def _keep_old_memory(recorder: Recording, placed: Placed) -> LazyTensor:
    """Gives a parameter's old memory a name of its own, for those who share it and keep it; returns what stands for
    it."""
    meta = placed.meta
    plain = intern(Meta(meta.shape, meta.stride, meta.dtype, meta.device, False))
    data = real_of(placed.tensor).detach() if placed.is_owned else None
    old = LazyTensor.make(recorder.engine.new_sources([(plain, placed.stage, data)])[0], recorder)
    sharers = [item for reference in placed.aliases if (item := reference()) is not None]
    placed.aliases.clear()
    for lazy in sharers:
        if lazy._alias_of is placed:
            lazy._alias_of = None
            become_twin(lazy, old)
            for member in members(lazy):
                member._view = member._view._replace(root=old)
            old._family, lazy._family = [*(old._family or ()), *(lazy._family or ())], None
        elif lazy._view is not None and lazy._view.root is placed.tensor:
            lazy._view = lazy._view._replace(root=old)
            old._family = old._family or []
            _join(old._family, lazy)
    return old


def _become_parameter(value: LazyTensor, placed: Placed) -> None:
    """The parameter's memory is what `value`, all its twins and its views are from now on."""
    for lazy in (value, *twins_of(value)):
        family = lazy._family if lazy is value else None
        lazy._family = lazy._twins = lazy._twin_of = None
        leave_memory(lazy)
        lazy._family = family
        _become_alias(lazy, placed)


def _given_up(recorder: Recording, plain: torch.Tensor, placed: Placed) -> torch.Tensor:
    """Returns the memory of a plain tensor, which becomes the parameter's; a copy of it where others use it."""
    if not can_be_recorded(recorder, plain):
        return plain.detach().clone()
    data = plain.detach()
    lazy = LazyTensor.make(alias_of(placed), recorder)
    exchange(recorder, plain, lazy, lazy._value)
    known: Any = plain
    _become_alias(known, placed)
    return data


def _put_memory(placed: Placed, data: torch.Tensor) -> None:
    meta = placed.meta
    if data.device != meta.device or data.stride() != meta.stride:
        data = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device).copy_(data)
    with DisableTorchFunction(), torch.no_grad():
        placed.tensor.data = data.detach()


# Gradients, and what has been recorded.


def _rebind_gradient(recorder: Recording, gradient: LazyTensor, value: torch.Tensor) -> None:
    twins, views = twins_of(gradient), members(gradient)
    with torch.no_grad():
        if twins or views:
            old = _copied_to(recorder, gradient, gradient._value.stage)
            for twin in twins:
                become_twin(twin, old)
            for view in views:
                view._view = view._view._replace(root=old)
            old._family, gradient._family, gradient._twins = gradient._family, None, None
            for view in views:
                retake(recorder, view)
        recorder.dispatch(torch.Tensor.copy_, (gradient, value), {})
    placed = recorder.engine.parameters[gradient._value.gradient_of]
    recorder.gradients.memory.release(placed.name)
    if way_of(recorder, placed, value) is Way.PART:
        recorder.gradients.memory.add(placed, gradient, value)
    elif type(value) is LazyTensor and value._alias_of is None and not value.requires_grad and not is_shared(value):
        for lazy in (main_of(value), *twins_of(main_of(value))):
            lazy._twins = None
            become_twin(lazy, gradient)


def _rebind_recorded(recorder: Recording, lazy: LazyTensor, value: torch.Tensor) -> None:
    if lazy.requires_grad:
        recorder.refuse(
            "the data of a recorded tensor that needs a gradient cannot be set",
            hint="use the tensor it is set to instead",
        )
    if type(value) is not LazyTensor and id(value) not in recorder.placed:
        leave_memory(lazy)
        lazy._value = Value(lazy._value.meta, lazy._value.stage)
        become_plain(recorder, lazy, value.detach())
        return
    new = recorder.dispatch(torch.Tensor.detach, (value,), {})
    leave_memory(lazy)
    _become_other(lazy, new)


def _become_other(lazy: LazyTensor, new: LazyTensor) -> None:
    """Let the program's `lazy` be what `new` is, which is only a name for it."""
    view, placed, main, is_counted = new._view, new._alias_of, new._twin_of, new._is_counted
    if main is not None:
        become_twin(lazy, main)
        return
    new._value.lazy = None
    lazy._value = new._value
    lazy._value.lazy = weakref.ref(lazy)
    lazy._view = view
    if placed is not None:
        _become_alias(lazy, placed, is_counted=is_counted)
    if view is not None and type(view.root) is LazyTensor:
        _join(view.root._family, lazy)


# Plain tensors.


def _rebind_plain(recorder: Recording, plain: torch.Tensor, value: torch.Tensor) -> None:
    """`plain.data = recorded`: a recorded tensor from now on, or where that cannot be, plain memory of its own."""
    if can_be_recorded(recorder, plain):
        meta = value._value.meta if type(value) is LazyTensor else recorder.placed[id(value)].meta
        lazy = LazyTensor.make(Value(meta, 0), recorder)
        exchange(recorder, plain, lazy, lazy._value)
        known: Any = plain
        _become_other(known, recorder.dispatch(torch.Tensor.detach, (value,), {}))
        return
    other = _parameter_of(recorder, value)
    if other is not None:
        recorder.refuse(
            f"a plain tensor would share the memory of {other.name}, which one rank has",
            hint="copy: plain.data.copy_(value)",
        )
    data = value.read().clone()  # type: ignore[attr-defined]
    with DisableTorchFunction():
        plain.data = data

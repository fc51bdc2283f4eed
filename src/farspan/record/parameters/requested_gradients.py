"""`torch.autograd.grad`: the gradients of parameters, recorded values and tensors outside the model are returned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.function_call import FunctionCall
from farspan.call.infer.entry import intern
from farspan.call.leaf import Leaf
from farspan.graph import RequestedGradients, Value, passed
from farspan.record.derivatives.recorded_gradients import record_gradients
from farspan.record.recorded_backward import record_backward
from farspan.record.team.team_tensor import TeamTensor, gradient_of_parts
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.call.leaf import Placed, Target
    from farspan.record.recording import Recording

__all__ = ["record_grad"]


def record_grad(recorder: Recording, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the backward that `torch.autograd.grad` asks for; the arguments are its own."""
    return _grad(recorder, *args, **kwargs)


def _grad(
    recorder: Recording,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    wanted_tensors: Sequence[Any] = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    if is_grads_batched:
        recorder.refuse("is_grads_batched=True cannot be recorded", hint="call torch.autograd.grad once for each")
    parts = [item._parts if type(item) is TeamTensor else [item] for item in wanted_tensors]
    flat = [part for each in parts for part in each]
    requested = _request(recorder, flat)
    if create_graph:
        gradients = _with_history(recorder, outputs, grad_outputs, flat, requested)
        return _as_asked(wanted_tensors, gradients, allow_unused, materialize_grads, requires_grad=True)
    backward = record_backward(recorder, outputs, grad_outputs, bool(retain_graph), requested=requested)
    is_open = any(_decides_in_backward(call.target) for call in passed(backward))
    changes = recorder.changing_backwards
    changing = changes.begin(backward) if changes.open or changes.latest else []
    recorder.next_graph()
    if recorder.hooks.are_there or backward.stops is not None:
        recorder.hooks.run_backward(backward, "torch.autograd.grad()")
    else:
        recorder.engine.flush("torch.autograd.grad()")
    if changing:
        recorder.changing_backwards.end(backward, changing)
    if is_open:
        _agree_on_found(recorder, requested)
    found = iter(_found_for(recorder, flat, requested))
    by_tensor = [[next(found) for _ in each] for each in parts]
    gradients = [gradient_of_parts(item, each) for item, each in zip(wanted_tensors, by_tensor, strict=True)]
    return _as_asked(wanted_tensors, gradients, allow_unused, materialize_grads)


def _decides_in_backward(target: Target) -> bool:
    """Returns whether only a backward through a call of `target` shows which gradients there are: where data decide it,
    or code of Python's, of which autograd's graph does not show what it reaches."""
    return type(target) is FunctionCall or (type(target) is Leaf and (target.is_resolved or target.runs_code_backward))


def _with_history(
    recorder: Recording, outputs: Any, grad_outputs: Any, wanted_tensors: Sequence[Any], requested: RequestedGradients
) -> list[torch.Tensor | None]:
    """Returns gradients that can be differentiated, for those of the tensors on which the outputs depend."""
    found = record_gradients(recorder, outputs, grad_outputs, requested)
    placed = [recorder.placed.get(id(item)) for item in wanted_tensors]
    return [
        found.get(known.name if known is not None else item._value if type(item) is LazyTensor else id(item))
        for item, known in zip(wanted_tensors, placed, strict=True)
    ]


def _request(recorder: Recording, wanted_tensors: Sequence[Any]) -> RequestedGradients:
    """Returns the request for the gradients of parameters, recorded tensors, and others that every rank has."""
    placed = [recorder.placed.get(id(item)) for item in wanted_tensors]
    recorded = [item for item in wanted_tensors if type(item) is LazyTensor]
    for item in recorded:
        recorder.deferred.record_one(item)
    sliced = [item.name for item in placed if item and item.name in recorder.splitting.matrices.sliced]
    if sliced:
        recorder.refuse(
            f"torch.autograd.grad for {sliced[0]}",
            why="the ranks of its stage have gradients of parts of it.",
            hint="loss.backward() and .grad, or farspan.distribute without tensor_parallel=",
        )
    outside = [
        item
        for item, known in zip(wanted_tensors, placed, strict=True)
        if known is None and type(item) is not LazyTensor
    ]
    if not all(item.requires_grad for item in [*outside, *recorded]):
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    return RequestedGradients(
        [item.name for item in placed if item is not None], outside, [item._value for item in recorded]
    )


def _found_for(
    recorder: Recording, wanted_tensors: Sequence[Any], requested: RequestedGradients
) -> list[torch.Tensor | None]:
    """Returns the gradients that a backward has found, in the order of the tensors."""
    keys = [item._value if type(item) is LazyTensor else recorder.placed.get(id(item)) for item in wanted_tensors]
    of_outside = iter(requested.gradients)
    of_recorded = iter(_gradients_of(recorder, [key for key in keys if key is not None], requested))
    return [next(of_outside if key is None else of_recorded) for key in keys]


def _agree_on_found(recorder: Recording, requested: RequestedGradients) -> None:
    """Lets all ranks know which gradients a backward has found, where its graph does not say."""
    keys = list(requested.values)
    own = [key for key, gradient in requested.found.items() if gradient is not None]
    text = json.dumps([[key for key in own if isinstance(key, str)], [keys.index(key) for key in own if key in keys]])
    for part in recorder.engine.gather("which gradients there are", text.encode()):
        names, numbers = json.loads(part)
        own += [*names, *(keys[number] for number in numbers)]
    requested.reached.intersection_update(own)


def _as_asked(
    wanted_tensors: Sequence[Any],
    known: list[Any],
    allow_unused: bool | None,
    materialize_grads: bool,
    *,
    requires_grad: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients, of which those that are None may have to be zeros, or may not be."""
    unused = [number for number, gradient in enumerate(known) if gradient is None]
    if unused and materialize_grads:
        for number in unused:
            item = wanted_tensors[number]
            known[number] = torch.zeros(item.shape, dtype=item.dtype, device=item.device, requires_grad=requires_grad)
    elif unused and not allow_unused:
        raise RuntimeError(
            f"The differentiated Tensor at index {unused[0]} appears to not have been used in the graph. Set "
            "allow_unused=True if this is the desired behavior."
        )
    return tuple(known)


def _gradients_of(
    recorder: Recording, keys: Sequence[Placed | Value], requested: RequestedGradients
) -> list[LazyTensor | None]:
    """Returns the gradients of parameters and recorded values, where the outputs depend on them."""
    names: list[str | Value] = [item if isinstance(item, Value) else item.name for item in keys]
    before = requested.before_hooks
    reached = [number for number, name in enumerate(names) if name in requested.reached and name not in before]
    metas = [replace(keys[number].meta, requires_grad=False, is_parameter=False) for number in reached]
    values = recorder.engine.new_sources(
        [
            (intern(meta), keys[number].stage, requested.found.get(names[number]))
            for number, meta in zip(reached, metas, strict=True)
        ]
    )
    found = [before.get(key) if isinstance(key, Value) else None for key in keys]
    for number, value in zip(reached, values, strict=True):
        found[number] = LazyTensor.make(value, recorder)
    return found

"""`torch.autograd.grad`: the gradients of parameters, and of tensors outside the model, are returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from farspan.graph import Wanted
from farspan.lazy.backward import record_backward
from farspan.lazy.metadata import intern
from farspan.lazy.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.lazy.leaf import Placed
    from farspan.lazy.recorder import Recorder

__all__ = ["record_grad"]


def record_grad(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the backward that `torch.autograd.grad` asks for; the arguments are its own."""
    return _grad(recorder, *args, **kwargs)


def _grad(
    recorder: Recorder,
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
    if any(type(item) is LazyTensor for item in wanted_tensors):
        recorder.refuse(
            "torch.autograd.grad cannot take the gradient of a recorded tensor",
            hint="of parameters and of inputs it can; compute others inside one module",
        )
    placed = [recorder.placed.get(id(item)) for item in wanted_tensors]
    outside = [item for item, known in zip(wanted_tensors, placed, strict=True) if known is None]
    for item in outside:
        if not item.requires_grad:
            raise RuntimeError("One of the differentiated Tensors does not require grad")
    wanted = Wanted([item.name for item in placed if item is not None], outside)
    keeps_graph = create_graph if retain_graph is None else retain_graph
    record_backward(recorder, outputs, grad_outputs, keeps_graph, create_graph, wanted=wanted)
    recorder.next_graph()
    recorder.engine.flush("torch.autograd.grad()")
    of_outside = iter(wanted.gradients)
    of_parameters = iter(_gradients_of(recorder, [item for item in placed if item is not None], wanted))
    known = [next(of_outside if item is None else of_parameters) for item in placed]
    if materialize_grads:
        known = [
            torch.zeros_like(item.detach()) if gradient is None else gradient
            for item, gradient in zip(wanted_tensors, known, strict=True)
        ]
    elif not allow_unused and any(gradient is None for gradient in known):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if "
            "this is the desired behavior."
        )
    return tuple(known)


def _gradients_of(recorder: Recorder, placed: Sequence[Placed], wanted: Wanted) -> list[LazyTensor | None]:
    reached = [item for item in placed if item.name in wanted.reached]
    metas = [replace(item.meta, requires_grad=False, is_parameter=False) for item in reached]
    values = recorder.engine.new_sources(
        [(intern(meta), item.stage, wanted.found.get(item.name)) for item, meta in zip(reached, metas, strict=True)]
    )
    made = iter([LazyTensor.make(value, recorder) for value in values])
    return [next(made) if item.name in wanted.reached else None for item in placed]

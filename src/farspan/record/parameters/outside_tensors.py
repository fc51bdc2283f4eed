"""Tensors outside the model that require grad: an input, a learned weight of the loss, a module that stays whole.

Every rank has them, computes with them, and gets their gradient: what autograd has recorded outside the model goes on
from there, on every rank alike.

    x (plain) --> h = f(x) --> | model, over the ranks | --> loss
    x.grad    <-- f backward <-| gradient of h, to all |
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.infer.entry import intern
from farspan.call.modes import apply_modes
from farspan.graph import EVERYWHERE, Meta, Value
from farspan.record.memory.of_gradients.gradient_memory import plain_gradient
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from farspan.graph import Backward
    from farspan.record.recording import Recording

__all__ = ["GRADIENT_ACCESS", "Outside", "access_gradient", "go_on", "go_on_outside"]

_GRAD: Any = torch.Tensor.grad
GRADIENT_ACCESS = frozenset([_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__])


class Outside:
    """The tensors outside the model that recorded calls use."""

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}
        self._gradients: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.is_used = False
        """True if there has been any."""

    def of(self, tensor: torch.Tensor) -> Value:
        """Returns the value that stands for `tensor` until the next flush."""
        self.is_used = True
        value = self._values.get(id(tensor))
        if value is None:
            meta = Meta(
                tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, True, is_parameter=tensor.is_leaf
            )
            value = self._values[id(tensor)] = Value(intern(meta), EVERYWHERE)
            value.data = tensor  # and so it lives as long as its id is known
        return value

    def forget(self) -> None:
        """A step has ended."""
        self._values.clear()

    def note_gradient(self, gradient: Any) -> None:
        """The program has got hold of a gradient outside the model."""
        if self.is_used and type(gradient) is torch.Tensor:
            self._gradients[id(gradient)] = gradient

    def is_gradient(self, tensor: torch.Tensor) -> bool:
        """Returns whether `tensor` is a gradient outside the model: every rank has it, and must keep it."""
        return id(tensor) in self._gradients


def access_gradient(recorder: Recording | None, function: Any, args: tuple[Any, ...]) -> Any:
    """Get, set or delete the gradient of a plain tensor, after the backwards that may change it."""
    outside = recorder.outside if recorder is not None and recorder.is_recording else None
    is_set = len(args) == 2 and args[1] is not None
    trained = None
    if recorder is not None and outside is not None:
        is_parameter = type(args[0]) is torch.nn.Parameter and id(args[0]) not in recorder.placed
        trained = recorder.engine.groups.outside if is_parameter else None
        ends_window = trained is not None and not is_set
        has_passed_barrier = outside.is_used and recorder.num_pending_backwards > 0
        if has_passed_barrier:
            recorder.engine.flush("the gradient of a tensor outside the model", ends_window=ends_window)
        if trained is not None:
            trained.add(args[:1])
        if ends_window:
            recorder.engine.average_gradients(has_passed_barrier=has_passed_barrier)
    if len(args) == 2 and type(args[1]) is LazyTensor and type(args[0]) is not LazyTensor:
        args = (args[0], plain_gradient(args[1]))  # a gradient of what every rank has
    with DisableTorchFunctionSubclass():
        result = function(*args)
    if outside is not None:
        outside.note_gradient(result)
        if trained is not None and is_set:
            trained.touch(args[0])
    return result


def go_on(backward: Backward, arrived: Sequence[tuple[Value, torch.Tensor]]) -> None:
    """Go on with `backward` in what autograd has recorded outside the model, on this rank as on every other.

    Args:
        backward: Has run, as far as it was recorded.
        arrived: Tensors outside the model, and the gradients they got.
    """
    if backward.stops is not None:
        backward.stops.arrived += arrived  # it goes on when all hooks have been called
    elif arrived:
        go_on_outside(backward, arrived)


def go_on_outside(backward: Backward, arrived: Sequence[tuple[Value, torch.Tensor]]) -> None:
    """Let autograd go on from tensors outside the model, with the gradients that have arrived; not from those that the
    program has frozen since the forward.
    """
    arrived = [(value, gradient) for value, gradient in arrived if value.data.requires_grad]
    if not arrived:
        return
    tensors = [value.data for value, _ in arrived]
    gradients = [gradient.to(value.data.device) for value, gradient in arrived]
    requested = backward.requested
    with apply_modes(backward.modes):
        if requested is None:
            torch.autograd.backward(tensors, gradients, retain_graph=backward.retain_graph)
        else:
            requested.gradients = torch.autograd.grad(
                tensors, requested.outside, gradients, retain_graph=backward.retain_graph, allow_unused=True
            )

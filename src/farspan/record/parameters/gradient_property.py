"""`parameter.grad` of placed parameters: a property that answers for the whole model on every rank."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from farspan.call.draws.scope import active
from farspan.errors import RecordError
from farspan.record.parameters.outside_tensors import access_gradient
from farspan.record.recording import Recording
from farspan.torch_private import raw_grad, set_raw_grad

__all__ = ["install_gradient_property", "recorder_of", "watch_parameter"]

_recorders: dict[int, Recording] = {}
"""The recorder of a parameter, by the parameter's id."""


def watch_parameter(parameter: torch.Tensor, recorder: Recording) -> None:
    """Let `parameter.grad` go to `recorder`."""
    _recorders[id(parameter)] = recorder


def recorder_of(parameter: Any) -> Recording | None:
    """Returns the recorder whose parameter it is; models that are gone had others of the same id."""
    recorder = _recorders.get(id(parameter))
    return recorder if recorder is not None and id(parameter) in recorder.placed else None


def install_gradient_property(kind: Any) -> None:
    """Let `grad` of tensors of class `kind` be this property, and torch's other name of it."""
    kind.grad = kind._grad = property(_get, _set, functools.partial(_set, gradient=None))


def _get(parameter: Any) -> Any:
    recorder = recorder_of(parameter)
    if recorder is None:
        return access_gradient(active.recorder, raw_grad, (parameter,))
    if not recorder.is_recording:
        view = recorder.step_view
        if view is not None:
            return view.gradient(recorder.placed[id(parameter)])
        if not recorder.is_in_optimizer:  # whose step comes after all backwards
            _check_not_early(recorder, parameter)
        return raw_grad(parameter)
    return recorder.gradients.get(recorder.placed[id(parameter)])


def _set(parameter: Any, gradient: Any) -> None:
    recorder = recorder_of(parameter)
    if recorder is None:
        access_gradient(active.recorder, set_raw_grad, (parameter, gradient))
    elif recorder.step_view is not None:
        recorder.step_view.set_gradient(recorder.placed[id(parameter)], gradient)
    elif not recorder.is_recording:
        if not recorder.is_in_optimizer:
            _check_not_early(recorder, parameter)
        set_raw_grad(parameter, gradient)
    else:
        recorder.gradients.set(recorder.placed[id(parameter)], gradient)


def _check_not_early(recorder: Recording, parameter: Any) -> None:
    """Raise if the code of a module uses a gradient before a backward that comes first in the program has added to it.

    A run on fakes sees such code; where data decide whether it does so, only the run itself shows it. torch's own files
    may use a gradient on their way (a compiler does), but for those that are called to clear it.
    """
    name = recorder.placed[id(parameter)].name
    if not recorder.engine.is_gradient_early(name):
        return
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if caller.startswith("torch.") and not caller.startswith(("torch.nn.modules", "torch.optim")):
        return
    raise RecordError(
        f"a module uses {name}.grad in its forward, before an earlier micro-batch has added to it.",
        why="data decide whether it does, so the earlier backward has been recorded and has not run yet.",
        hint="read or change the gradient outside of the model; or call farspan.flush() after loss.backward()",
    )

"""`parameter.grad` of placed parameters: a property that answers for the whole model on every rank."""

from __future__ import annotations

import functools
from typing import Any

import torch

from farspan.call.draws.scope import active
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
        return raw_grad(parameter) if view is None else view.gradient(recorder.placed[id(parameter)])
    return recorder.gradients.get(recorder.placed[id(parameter)])


def _set(parameter: Any, gradient: Any) -> None:
    recorder = recorder_of(parameter)
    if recorder is None:
        access_gradient(active.recorder, set_raw_grad, (parameter, gradient))
    elif recorder.step_view is not None:
        recorder.step_view.set_gradient(recorder.placed[id(parameter)], gradient)
    elif not recorder.is_recording:
        set_raw_grad(parameter, gradient)
    else:
        recorder.gradients.set(recorder.placed[id(parameter)], gradient)

"""Torch functions of the program in which nothing recorded takes part."""

from __future__ import annotations

from typing import Any

import torch

from farspan.call.draws.drawing_functions import DRAWS, has_own_generator, may_draw
from farspan.call.draws.scope import draw_at_once
from farspan.record.recording import Recording
from farspan.record.tensor import LazyTensor

__all__ = ["concerns", "run_unrecorded"]


def run_unrecorded(func: Any, args: Any, kwargs: Any, recorder: Recording) -> Any:
    """Run a function on tensors that are not recorded. What torch.compile traces draws when it runs."""
    recorder.held_objects.before_write(func, args, kwargs)
    if recorder.draws.is_plain:
        if not torch.compiler.is_compiling() and may_draw(func) and not has_own_generator(kwargs):
            if func in DRAWS and recorder.frame is recorder.root:
                recorder.noted_draws.note(func)
            return recorder.draws.now(func, args, kwargs)
    elif func in DRAWS and not has_own_generator(kwargs):
        if recorder.frame is not recorder.root:
            return draw_at_once(recorder.frame, recorder.draws.first_seed, func, args, kwargs)
        recorder.noted_draws.note(func)
    return func(*args, **kwargs)


def concerns(args: Any, kwargs: Any, placed: dict[int, Any]) -> bool:
    """Returns whether a lazy tensor or a placed parameter is among the arguments."""
    for item in args:
        if isinstance(item, torch.Tensor):
            if type(item) is LazyTensor or id(item) in placed:
                return True
        elif isinstance(item, (list, tuple)):
            if concerns(item, None, placed):
                return True
        elif isinstance(item, dict) and concerns(item.values(), None, placed):
            return True
    return bool(kwargs) and concerns(kwargs.values(), None, placed)

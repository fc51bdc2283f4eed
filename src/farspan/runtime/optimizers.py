"""Optimizers: the recorded backwards run before a step, and inside it parameters and gradients are plain tensors."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from farspan.errors import RecordError
from farspan.runtime.engine import Engine
from farspan.runtime.world import current_engine

__all__ = ["watch_optimizers"]

_watched = False
_original_state_dict: Any = Optimizer.state_dict


@functools.wraps(Optimizer.state_dict)
def _state_dict(optimizer: Optimizer) -> Any:
    engine = current_engine()
    if engine is not None and engine.num_ranks > 1 and _has_placed(optimizer, engine.recorder.placed):
        raise RecordError(
            "optimizer.state_dict() is not whole on any one of several ranks.",
            why="each rank has the moments of its own parameters only; a file of them would silently lack the others.",
            hint="save model.state_dict(), which is whole, and begin the moments anew",
        )
    return _original_state_dict(optimizer)


def watch_optimizers() -> None:
    """Hook all optimizers of this process, once."""
    global _watched
    if not _watched:
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_after)
        Optimizer.state_dict = _state_dict  # type: ignore[method-assign]
        _watched = True


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    engine = current_engine()
    if engine is not None and _has_placed(optimizer, engine.recorder.placed):
        if engine.num_ranks > 1 and isinstance(optimizer, LBFGS):
            raise RecordError(
                "LBFGS cannot step a model that is distributed over several ranks.",
                why="it multiplies the gradients of all parameters with each other, and each rank has its own only.",
                hint="use a first-order optimizer, or run the program on one rank",
            )
        if not engine.recorder.is_recording and not engine.recorder.is_in_optimizer:
            raise RecordError(
                "optimizer.step() is called in a gradient hook.",
                why="the backward runs when all micro-batches of the step have been recorded: the parameters would\n"
                "change while later ones still need them.",
                hint="call optimizer.step() after loss.backward()",
            )
        args, kwargs = _with_recording_closure(engine, args, kwargs)
        if engine.recorder.has_pending():
            engine.flush("optimizer.step()")
        else:
            engine.meet("optimizer.step()")  # a slower rank may still read what the step will change
        engine.recorder.enter_optimizer()
        return args, kwargs
    return None


def _with_recording_closure(engine: Engine, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The optimizer (first argument) may get a closure: what it does is recorded as ever, and run before it returns."""

    def wrap(closure: Any) -> Any:
        def recorded() -> Any:
            engine.recorder.leave_optimizer()
            try:
                result = closure()
                engine.flush("the closure of optimizer.step()")
            finally:
                engine.recorder.enter_optimizer()
            return result

        return recorded if callable(closure) else closure

    return (*args[:1], *map(wrap, args[1:2]), *args[2:]), {
        name: wrap(value) if name == "closure" else value for name, value in kwargs.items()
    }


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    engine = current_engine()
    if engine is not None and engine.recorder.is_in_optimizer:
        engine.recorder.leave_optimizer()
        engine.parameters_changed()


def _has_placed(optimizer: Optimizer, placed: Any) -> bool:
    return any(id(parameter) in placed for group in optimizer.param_groups for parameter in group["params"])

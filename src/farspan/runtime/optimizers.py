"""Optimizers: the recorded backwards run before a step, and inside it parameters and gradients are plain tensors."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from farspan.runtime.world import current_engine

__all__ = ["watch_optimizers"]

_watched = False


def watch_optimizers() -> None:
    """Hook all optimizers of this process, once."""
    global _watched
    if not _watched:
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_after)
        _watched = True


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    engine = current_engine()
    if engine is not None and _has_placed(optimizer, engine.recorder.placed):
        engine.flush("optimizer.step()")
        engine.recorder.enter_optimizer()


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    engine = current_engine()
    if engine is not None and engine.recorder.is_in_optimizer:
        engine.recorder.leave_optimizer()
        engine.parameters_changed()


def _has_placed(optimizer: Optimizer, placed: Any) -> bool:
    return any(id(parameter) in placed for group in optimizer.param_groups for parameter in group["params"])

"""The program's own hooks around a step are of the program: what they do is no part of the step.

    step()   the program's hooks before it  |  begin - step - end  |  its hooks after it

torch calls the hooks of all optimizers, among them farspan's, outside of an optimizer's own before a step, and behind
them after it: the step would begin before the hooks of the program, and end after them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from farspan.execute.process.world import current_engine
from farspan.torch_private import call_inside_step_hooks, forget_inside_step_hooks, has_step_hooks

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from farspan.execute.engine import Engine

__all__ = ["between_hooks"]

_Before = Callable[["Optimizer", Any, Any], "tuple[Any, Any] | None"]
_After = Callable[["Optimizer", Any, Any], None]


def between_hooks(begin: _Before, end: _After) -> tuple[_Before, _After]:
    """Returns two hooks, before and after the steps of all optimizers.

    Args:
        begin: Begins a step, called as a hook: after all hooks of the program before it. It is called for a step that
            another step calls too.
        end: Ends it, before the hooks of the program after it.
    """

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if has_step_hooks(optimizer) and _is_outermost(current_engine()):
            call_inside_step_hooks(optimizer, begin_inside, end_inside)
            return None
        return begin(optimizer, args, kwargs)

    def begin_inside(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return begin(optimizer, args, kwargs) if _is_outermost(current_engine()) else None

    def end_inside(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        engine = current_engine()
        if engine is not None and engine.values.optimizers.depth == 1:  # not a step that the step has called
            end(optimizer, args, kwargs)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        end(optimizer, args, kwargs)
        engine = current_engine()
        if engine is None or not engine.recorder.is_in_optimizer:
            forget_inside_step_hooks(optimizer)

    return before, after


def _is_outermost(engine: Engine | None) -> bool:
    """Returns whether a step that begins is the program's: not called by another step, or in a gradient hook."""
    return engine is not None and engine.recorder.is_recording and not engine.recorder.is_in_optimizer

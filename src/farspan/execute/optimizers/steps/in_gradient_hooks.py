"""Steps that a gradient hook calls, while a backward runs: an optimizer for each parameter, where that lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.errors import RecordError
from farspan.execute.optimizers.states import placed_in

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from farspan.execute.engine import Engine

__all__ = ["check_step_in_hook"]


def check_step_in_hook(engine: Engine, optimizer: Optimizer) -> None:
    """Notes a step that is called while a backward runs, at the owner of the parameter whose hook it is.

    Raises:
        RecordError: It cannot be taken there.
    """
    placed = placed_in(optimizer, engine.recorder.placed)
    if not engine.recorder.runs_each_backward:
        raise RecordError(
            "optimizer.step() is called in a gradient hook.",
            why="the backward runs when all micro-batches of the step have been recorded: the parameters would\n"
            "change while later ones still need them.",
            hint="parameter.register_post_accumulate_grad_hook(hook), with an optimizer for each parameter",
        )
    if engine.groups.num_groups > 1:
        raise RecordError(
            "optimizer.step() is called in a gradient hook, in a program with data_parallel.",
            why="the hook sees the gradient of one group; what is averaged over the groups comes after the backward.",
            hint="optimizer.step() after loss.backward()",
        )
    others = [item.name for item in placed if not item.is_owned]
    if others:
        raise RecordError(
            "optimizer.step() is called in a gradient hook, for parameters of several ranks.",
            why=f"the hook runs where its parameter lives; {others[0]} lives on another rank.",
            hint="an optimizer for each parameter, or optimizer.step() after loss.backward()",
        )
    engine.values.optimizers.add_in_hook(optimizer, [item.name for item in placed])

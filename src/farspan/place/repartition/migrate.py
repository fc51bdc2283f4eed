"""Repartitions a model in a running program: a new owner asks the old one for a parameter and what goes with it.

every rank      which moves?   may I?  --- vote ---   all may
new owner                                             pulls value, gradient, optimizer state
every rank                                            --- all have come ---   stub <-> tensor, new leaves
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from farspan.execute.engine import Engine
from farspan.execute.optimizers.states import as_laid_out
from farspan.place.owners import ModelPlan, Move, can_go, is_free_of_recorded, moves, repartition
from farspan.place.repartition.moved_states import MovedStates
from farspan.torch_private import set_raw_grad

__all__ = ["place_elsewhere"]

_FREE, _USED, _NEVER = b"free", b"used", b"never"


def place_elsewhere(engine: Engine, model: nn.Module, plan: ModelPlan) -> int | None:
    """Give `model` the places of another plan; all ranks call it, between two steps.

    Args:
        engine: This rank's; nothing is recorded that has not run.
        model: A model that is placed.
        sites: The new plan.

    Returns:
        Bytes of parameters that have gone to another rank; None where nothing has changed, since on some rank something
        still uses a parameter that would.
    """
    engine.slices.come_home("the model is repartitioned")
    found = moves(model, engine.recorder, plan)
    engine.masks.resolve()
    with engine.executing(), engine.console.said_if_slow("moving parameters") as progress:
        may = _may_move(engine, model, found)
        if may is None:
            gc.collect()  # what was recorded refers to itself, and so to parameters
            engine.agreement.barrier("the model may move")  # of ranks in one process, one collects for all
            may = _may_move(engine, model, found)
        if not may:
            return None
        moved_bytes = sum(_size(move) for move in found if _rank_after(engine, plan, move) != _rank_of(engine, move))
        parameters = [move for move in found if move.item.is_parameter and move.stage is not None]
        states = MovedStates(engine, {move.item.name: _rank_of(engine, move) for move in parameters})
        needed, coming = [move for move in found if move.is_needed], list[_Coming]()
        for move in needed:
            progress.note(len(coming), len(needed), "tensors that rank 0 is to have")
            coming.append(_fetched(engine, plan, move, states))
        engine.agreement.barrier("parameters have come")  # from here on nobody asks for them
        leaving = [move.item for move in found if move.item.is_owned and not _is_mine(plan, move)]
        for item in leaving:
            engine.values.gradients.keep(item)
        data = {each.name: each.value for each in coming}
        repartition(model, engine.recorder, plan, found, data)
        engine.parameters.clear()
        engine.parameters.update({item.name: item for item in engine.recorder.placed.values()})
        states.settle()
        for each in coming:
            each.settle(engine)
    engine.recorder.gradients.forget()
    engine.parameters_changed()
    return moved_bytes


def _may_move(engine: Engine, model: nn.Module, found: Sequence[Move]) -> bool | None:
    """Returns whether nothing uses, on any rank, what is to move; None where only garbage may."""
    if any(item.hooked_at is not None for item in engine.parameters.values()):
        vote = _NEVER
    else:
        is_free = is_free_of_recorded(model) and can_go(model, [move.item for move in found])
        vote = _FREE if is_free else _USED
    votes = engine.agreement.gather("may parameters move", vote)
    if _NEVER in votes:
        return False
    return True if all(each == _FREE for each in votes) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """A parameter or buffer that comes to this rank, and what goes with it."""

    name: str
    value: torch.Tensor
    gradient: torch.Tensor | None

    def settle(self, engine: Engine) -> None:
        if self.name not in engine.parameters:
            return  # a buffer that every rank has now
        tensor = engine.parameters[self.name].tensor
        if self.gradient is not None:
            set_raw_grad(tensor, self.gradient.to(tensor.device))


def _fetched(engine: Engine, plan: ModelPlan, move: Move, states: MovedStates) -> _Coming:
    item, owner = move.item, _rank_of(engine, move)
    gradient = None
    if item.is_parameter and move.stage is not None:
        if engine.has_gradient(item):
            gradient = _gradient_of(engine, move, owner)
        states.fetch(item, plan.device_of(move.stage, item))
    value = as_laid_out(item.meta).copy_(engine.read_parameter(item))
    return _Coming(name=item.name, value=value, gradient=gradient)


def _gradient_of(engine: Engine, move: Move, owner: int) -> torch.Tensor:
    """Returns a copy of a gradient, laid out as autograd lays out those of its parameter."""
    if engine.has_sparse_gradient(move.item):
        return engine.sparse_gradient(move.item)
    data = engine.values.pull(owner, "gradient", list(engine.values.gradients.key_of(move.item)))
    return as_laid_out(move.item.meta).copy_(data)


def _size(move: Move) -> int:
    return move.item.meta.size_bytes if move.item.is_parameter else 0


def _rank_of(engine: Engine, move: Move) -> int:
    return engine.teams[move.item.stage].leader.rank


def _rank_after(engine: Engine, plan: ModelPlan, move: Move) -> int | None:
    return None if move.stage is None else engine.teams[plan.stages[move.stage]].leader.rank


def _is_mine(plan: ModelPlan, move: Move) -> bool:
    return move.stage is None or plan.is_mine(move.stage)

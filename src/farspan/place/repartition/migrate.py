"""Repartitions a model in a running program: a new owner asks the old one for a parameter and what goes with it.

every rank      which moves?   what uses it?  --- gather ---   nothing
new owner                                             pulls value, gradient, optimizer state
every rank                                            --- all have come ---   stub <-> tensor, new leaves
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from farspan.call.naming import format_where
from farspan.execute.engine import Engine
from farspan.execute.optimizers.states import as_laid_out
from farspan.place.owners import ModelPlan, Move, buffers_of_leaves, moves, repartition
from farspan.place.repartition.moved_states import MovedStates
from farspan.place.repartition.users import what_uses
from farspan.record.tensor import LazyTensor
from farspan.torch_private import set_raw_grad

__all__ = ["place_elsewhere"]


def place_elsewhere(engine: Engine, model: nn.Module, plan: ModelPlan, users: list[str]) -> int | None:
    """Give `model` the places of another plan; all ranks call it, between two steps.

    Args:
        engine: This rank's; nothing is recorded that has not run.
        model: A model that is placed.
        plan: The new one.
        users: What still uses a parameter that would move is added, if anything does; the same on every rank.

    Returns:
        Bytes of parameters that have gone to another rank; None where nothing has changed, since something still uses a
        parameter that would.
    """
    engine.slices.come_home("the model is repartitioned")
    found = moves(model, engine.recorder, plan)
    engine.masks.resolve()
    with engine.executing(), engine.console.said_if_slow("moving parameters") as progress:
        user = _user(engine, model, found)
        if user:
            users.append(user)
            return None
        moved_bytes = sum(_size(move) for move in found if _rank_after(engine, plan, move) != _rank_of(engine, move))
        parameters = [move for move in found if move.item.is_parameter and move.stage is not None]
        states = MovedStates(engine, {move.item.name: _rank_of(engine, move) for move in parameters})
        needed, coming = [move for move in found if move.is_needed], list[_Coming]()
        for move in needed:
            progress.note(len(coming), len(needed), "tensors that rank 0 is to have")
            coming.append(_fetched(engine, plan, move, states))
        _read_buffers(model, plan)
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


def _read_buffers(model: nn.Module, plan: ModelPlan) -> None:
    """Reads the buffers that the code of a split module has set to recorded tensors, where it will be one unit."""
    recorded = {id(buffer) for buffer, _ in buffers_of_leaves(model, plan).values() if type(buffer) is LazyTensor}
    read: dict[int, torch.Tensor] = {}
    for module in model.modules() if recorded else ():
        for name, buffer in module._buffers.items():
            if type(buffer) is LazyTensor and id(buffer) in recorded:
                if id(buffer) not in read:
                    read[id(buffer)] = buffer.read().clone()
                module._buffers[name] = read[id(buffer)]


def _user(engine: Engine, model: nn.Module, found: Sequence[Move]) -> str:
    """Returns what uses, on the first rank where something does, what is to move; "" for nothing."""
    hooked = [item for item in engine.parameters.values() if item.hooked_at is not None]
    if hooked:
        own = f"{hooked[0].name} has a hook, registered at {format_where(hooked[0].hooked_at)}"
    else:
        own = what_uses(model, [move.item for move in found])
    told = [text.decode() for text in engine.agreement.gather("what uses parameters", own.encode())]
    return next(filter(None, told), "")


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

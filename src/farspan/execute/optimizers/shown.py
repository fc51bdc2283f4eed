"""Shows what an optimizer keeps in its state, its groups and its attributes: in a step, and outside of it.

    in a step     own tensors on the rank that has them, recorded tensors without data on the others (`step_view`)
    outside       recorded tensors on every rank, so that all do the same with them

It is turned into the one when a step begins, and into the other when the program asks for `optimizer.state`; where
there are such tensors in groups or attributes too, which the program may read at any time, when the step ends.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from farspan.call.infer.entry import intern, meta_of
from farspan.call.leaf import Placed
from farspan.execute.agreement.broadcast import broadcast_tensors
from farspan.execute.optimizers.kept_state import (
    change_tensors,
    parts_beside_state,
    parts_of,
    parts_of_state,
    raw_state,
    tensors_in,
)
from farspan.execute.optimizers.own import is_own, make_known_as, make_own, shown_value
from farspan.execute.optimizers.states import as_laid_out, placed_in
from farspan.graph import Meta, Value
from farspan.record.memory.exchanged import become_plain
from farspan.record.ops.overrides import read_data, read_recorded
from farspan.record.saving.parameters import laid_out, reserved_tensor
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.execute.engine import Engine

__all__ = ["keeps_beside_state", "kept_for", "show_to_all", "show_to_step", "whole_state"]


def keeps_beside_state(optimizer: Optimizer) -> bool:
    """Returns whether tensors that one rank has are in its groups or attributes."""
    found = False

    def look(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal found
        found = found or type(tensor) is LazyTensor or is_own(tensor)
        return tensor

    for _, part in parts_beside_state(optimizer):
        part.change(look)
    return found


def show_to_step(engine: Engine, optimizer: Optimizer, *, is_as_left: bool) -> None:
    """A step begins: own tensors are plain, and what is known to all is.

    Args:
        engine: This rank's.
        optimizer: It is about to step.
        is_as_left: Whether its state still is as a step sees it. Groups and attributes may have been given something
            else since (a GradScaler gives `found_inf` for each step).
    """

    known: dict[LazyTensor, torch.Tensor] = {}
    """What is in several places is one tensor in all of them."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not LazyTensor:
            return tensor
        if tensor not in known:
            known[tensor] = find(tensor)
        return known[tensor]

    def find(tensor: LazyTensor) -> torch.Tensor:
        value = tensor._value
        is_recorded = value.call is not None or value.index > 0
        if is_recorded and value.meta.numel == 1:
            return engine.read(value)
        if engine.teams[value.stage].leader.rank == engine.rank:
            return make_known_as(make_own(engine.read(value)), value)
        meta = dataclasses.replace(value.meta, requires_grad=False)  # as its owner computes with it
        return make_known_as(LazyTensor.make(Value(intern(meta), value.stage), engine.recorder), value)

    outside: dict[int, LazyTensor] = {}
    """What is kept for parameters outside the model, with which every rank computes."""

    def note_outside(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is LazyTensor:
            outside[id(tensor)] = tensor
        return tensor

    for _, part in parts_beside_state(optimizer):
        part.change(change)
    if not is_as_left:
        for _, item, part in parts_of_state(optimizer, engine.recorder.placed):
            if item is None and isinstance(part.keys[0], nn.Parameter):
                part.change(note_outside)
            elif item is None or not engine.slices.has_given_away(optimizer, item):
                part.change(change)
        if outside:
            _let_all_have(engine, [*outside.values()])


def _let_all_have(engine: Engine, tensors: list[LazyTensor]) -> None:
    """Let recorded tensors be plain ones on every rank. All ranks call it together."""
    values = [tensor._value for tensor in tensors]
    owners = [engine.teams[value.stage].leader.rank for value in values]
    data = [
        engine.read(value).clone() if owner == engine.rank else as_laid_out(value.meta)
        for value, owner in zip(values, owners, strict=True)
    ]
    broadcast_tensors(engine, "what an optimizer keeps for parameters outside the model", data, owners)
    for tensor, item in zip(tensors, data, strict=True):
        become_plain(engine.recorder, tensor, item)


def show_to_all(engine: Engine, optimizer: Optimizer, number: int) -> None:
    """The program asks for the state of the `number`-th optimizer: the same recorded tensors everywhere."""
    first_stage = {team.leader.rank: index for index, team in reversed(list(enumerate(engine.teams)))}
    known: dict[int, tuple[torch.Tensor, LazyTensor]] = {}
    for name, item, part in parts_of(optimizer, engine.recorder.placed):
        place = -1
        own: list[torch.Tensor | None] = []

        def change(
            tensor: torch.Tensor, name: str = name, item: Placed | None = item, own: list[Any] = own
        ) -> torch.Tensor:
            nonlocal place
            place += 1
            own.append(tensor if is_own(tensor) else None)
            if type(tensor) is LazyTensor:
                value = tensor._value
                rank = engine.teams[value.stage].leader.rank
                if rank == engine.rank or value.call is not None or value.index > 0:
                    return tensor
                meta, data = value.meta, None
            elif is_own(tensor):
                meta, data, rank = meta_of(tensor.detach()), tensor, engine.rank
            else:
                return tensor
            if id(tensor) in known:
                return known[id(tensor)][1]
            stage = first_stage[rank]
            if item is not None and engine.teams[item.stage].leader.rank == rank:
                stage = item.stage
            shown = Value(intern(meta), stage)
            shown.state_of = (number, name, place)
            shown.data = data
            held = _held(tensor, shown)
            lazy = LazyTensor.make(shown, engine.recorder) if held is None else held
            known[id(tensor)] = (tensor, lazy)
            return lazy

        part.change(change)
        if item is None:
            engine.values.optimizers.shown[number, name] = own


def _held(tensor: torch.Tensor, shown: Value) -> LazyTensor | None:
    """Returns the recorded tensor through which the program has got `tensor` of what an optimizer keeps, now one of
    `shown`: what it writes into the one that it holds is written into what the optimizer keeps.

    Returns None where it holds none.
    """
    is_shown = type(tensor) is LazyTensor and tensor._value.state_of is not None
    known = tensor._value if is_shown else shown_value(tensor)  # type: ignore[attr-defined]
    held = None if known is None or known.lazy is None else known.lazy()
    if known is not None and type(held) is LazyTensor and known.meta.requires_grad:
        return held  # what the program has computed keeps its history
    if known is None or type(held) is not LazyTensor or known.meta is not shown.meta:
        return None
    known.lazy = None
    held._value = shown
    shown.lazy = weakref.ref(held)
    return held


def _read_kept(engine: Engine, state: Any) -> Any:
    """Returns a copy of what an optimizer keeps for one parameter, with the data of recorded tensors: one question at
    most for the small ones, while the large ones get theirs when they are used.
    """
    known: dict[int, Any] = {}
    asked: dict[tuple[int, int, str], list[tuple[LazyTensor, int]]] = {}

    def ask(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor._value.state_of if type(tensor) is LazyTensor and tensor._value.data is None else None
        if type(tensor) is not LazyTensor or key is None:
            known[id(tensor)] = read_data(tensor)
            return tensor
        number, name, place = key
        rank = engine.teams[tensor._value.stage].leader.rank

        def read(memory: torch.Tensor | None) -> torch.Tensor:
            return engine.values.pull_kept(rank, number, name, [place], memory)[0]

        reserved = reserved_tensor(tensor._value.meta, read)
        if reserved is None:
            asked.setdefault((rank, number, name), []).append((tensor, place))
        else:
            known[id(tensor)] = reserved
        return tensor

    change_tensors(state, ask)
    for (rank, number, name), items in asked.items():
        found = engine.values.pull_kept(rank, number, name, [place for _, place in items])
        for (tensor, _), data in zip(items, found, strict=True):
            known[id(tensor)] = laid_out(tensor._value.meta, data)
    return copy.deepcopy(state, known)


# Parameters that are loaded.


def kept_for(engine: Engine, item: Placed, state: Any, given: Any) -> Any:
    """Let what was loaded for a parameter be kept by its owner alone, but for what is no larger than a number.

    Args:
        engine: This rank's.
        item: The parameter.
        state: What the optimizer has made of what it was given.
        given: What it was given: with the memory of whole tensors, which `state` may not have here. The optimizer may
            have added to it, or have put tensors in the place of numbers.
    """
    if isinstance(state, dict) and isinstance(given, dict):
        for name, kept in state.items():
            state[name] = _kept_as_given(engine, item, kept, given.get(name))
        return state
    return _kept_as_given(engine, item, state, given)


def _kept_as_given(engine: Engine, item: Placed, state: Any, given: Any) -> Any:
    loaded, layouts = tensors_in(state), tensors_in(given)
    layouts = layouts if len(layouts) == len(loaded) else loaded
    strides = iter([tensor.stride() for tensor in layouts])

    def change(tensor: torch.Tensor) -> torch.Tensor:
        stride = next(strides)
        if tensor.dim() == 0 or tensor.numel() > item.meta.numel or type(tensor) is LazyTensor:
            return tensor
        if item.is_owned:
            return make_own(tensor)
        meta = Meta(tuple(tensor.shape), stride, tensor.dtype, tensor.device, False)
        return LazyTensor.make(Value(intern(meta), item.stage), engine.recorder)

    return change_tensors(state, change)


def whole_state(engine: Engine, optimizer: Optimizer) -> defaultdict[Any, Any]:
    """Returns the state of an optimizer with what other ranks keep fetched from there, in plain tensors."""
    number = engine.values.optimizers.number_of(optimizer)
    kept, whole = raw_state(optimizer), defaultdict[Any, Any](dict)
    for placed in placed_in(optimizer, engine.recorder.placed):
        state = kept.get(placed.tensor)
        if engine.slices.keeps(optimizer, placed):
            whole[placed.tensor] = read_recorded(engine.slices.kept_of(optimizer, placed))
            continue
        steps_elsewhere = number is not None or engine.recorder.runs_each_backward
        if not placed.is_owned and steps_elsewhere and not state:  # kept there alone
            state = engine.values.pull_state(engine.teams[placed.stage].leader.rank, number, placed.name) or state
        if state is not None:
            whole[placed.tensor] = _read_kept(engine, state)
    whole.update((key, _read_kept(engine, state)) for key, state in kept.items() if key not in whole)
    return whole

"""Placing a model: each rank keeps what its stages own, and a stub for every other parameter; and repartitioning it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from farspan.call.infer.entry import meta_of
from farspan.call.leaf import Leaf, Placed
from farspan.call.user_hooks import open_leaves
from farspan.errors import PlanError
from farspan.execute.step.segment import StageDevice
from farspan.execute.teams import device_of
from farspan.place.deferred.construction import CONSTRUCTION
from farspan.place.deferred.models import fill_all, fill_tensor
from farspan.plan import Team
from farspan.record.intercept import watch_module
from farspan.record.parameters.gradient_property import watch_parameter
from farspan.record.recording import Recording
from farspan.record.surgery.derived import cut_from_parameters
from farspan.record.surgery.real import become_real, without_weak_references
from farspan.record.team.team_tensor import SplitStage
from farspan.record.tensor import StubParameter
from farspan.torch_private import (
    DisableTorchFunction,
    is_memory_of_others,
    move_data,
)

__all__ = [
    "Move",
    "ModelPlan",
    "buffers_of_leaves",
    "moves",
    "place",
    "repartition",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """A plan, resolved for one model.

    Behind the stages of the plan stand those of the single members of its wide stages, which own what lies there.

    Attributes:
        owner: Stage that has each parameter, by its first name.
        leaf_stage: Stage that runs a module as a whole, by name; None for containers and for what is placed nowhere.
        home: For each stage the one that has the buffers of its modules: itself, or that of its first member.
        stages: The recorder's number of each stage.
        teams: For each stage, who runs it.
        rank: This one.
        takes_cpu: See `StageDevice`.
        splits: By name of a module, the split stage that it lies on.
    """

    owner: Mapping[str, int]
    leaf_stage: Mapping[str, int | None]
    home: Sequence[int]
    stages: Sequence[int]
    teams: Sequence[Team]
    rank: int
    takes_cpu: bool
    splits: Mapping[str, SplitStage] = field(default_factory=dict[str, SplitStage])

    def is_mine(self, stage: int) -> bool:
        """Returns whether this rank has what a stage holds, if that is not a wide one."""
        return self.teams[stage].leader.rank == self.rank

    def device_of(self, stage: int, item: Placed) -> torch.device:
        """Returns where a stage, which is not a wide one, has a parameter or buffer."""
        return StageDevice(device_of(self.teams[stage].leader), self.takes_cpu).of(item.meta.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A parameter or buffer that gets another place.

    Attributes:
        item: As it is placed now.
        stage: Of the new plan; None for a buffer that every rank is to have.
        is_needed: Whether this rank needs the data, and has not got them.
    """

    item: Placed
    stage: int | None
    is_needed: bool


def place(
    model: nn.Module, recorder: Recording, plan: ModelPlan, *, prefix: str
) -> tuple[list[Placed], list[tuple[torch.Tensor, Placed]]]:
    """Give `model`'s modules and parameters their stages, in place.

    Args:
        model: The user's model; its parameters keep their identity.
        recorder: Will see its calls.
        sites: The plan.
        prefix: Put before every name, to tell several models apart.

    Returns:
        Everything placed: parameters, and the buffers of leaves; and the memory of those that have other names, too.
    """
    placed: dict[int, Placed] = {}
    if not all(map(plan.is_mine, set(plan.home) | set(plan.owner.values()))):
        cut_from_parameters(model)
    memory_of_others: list[tuple[torch.Tensor, Placed]] = []
    outside = recorder.engine.groups.outside
    if outside is not None:
        outside.discard(model.parameters())
    with without_weak_references(model):
        for name, parameter in model.named_parameters():
            placed[id(parameter)] = _placed(prefix + name, parameter, plan, plan.owner[name], is_parameter=True)
            memory_of_others += _memory_of_others(placed[id(parameter)])
            watch_parameter(parameter, recorder)
            _settle(placed[id(parameter)], plan, plan.owner[name], recorder)
    for name, module in model.named_modules():
        watch_module(module, recorder, prefix + name)
    for name, (buffer, stage) in buffers_of_leaves(model, plan).items():
        if id(buffer) not in placed:
            placed[id(buffer)] = _placed(prefix + name, buffer, plan, stage, is_parameter=False)
            memory_of_others += _memory_of_others(placed[id(buffer)])
            _settle(placed[id(buffer)], plan, stage, recorder)
    fill_all(model)
    recorder.placed.update(placed)
    recorder.roots[id(model)] = prefix
    _make_leaves(model, recorder, plan, prefix)
    return list(placed.values()), memory_of_others


def moves(model: nn.Module, recorder: Recording, plan: ModelPlan) -> list[Move]:
    """Returns what has another place in a new plan than it has now: the same list on every rank.

    Args:
        model: A model that is placed.
        recorder: That has placed it.
        sites: The new plan.
    """
    new: dict[int, int | None] = dict.fromkeys(map(id, model.buffers()))
    new.update((id(buffer), stage) for buffer, stage in buffers_of_leaves(model, plan).values())
    new.update((id(item), plan.owner[name]) for name, item in model.named_parameters())
    found: list[Move] = []
    for key, stage in new.items():
        item = recorder.placed.get(key)
        if item is None:
            continue
        if stage is None:
            found.append(Move(item=item, stage=None, is_needed=not item.is_owned))
        elif plan.stages[stage] != item.stage:
            found.append(Move(item=item, stage=stage, is_needed=plan.is_mine(stage) and not item.is_owned))
    return found


def repartition(
    model: nn.Module, recorder: Recording, plan: ModelPlan, found: Sequence[Move], data: Mapping[str, torch.Tensor]
) -> None:
    """Give `model` the places of another plan. Nothing may be recorded that has not run.

    Args:
        model: A model that is placed.
        recorder: That has placed it.
        sites: The new plan.
        found: Its moves.
        data: By name, what is needed here.
    """
    prefix = recorder.roots[id(model)]
    with without_weak_references(model):
        for move in found:
            item = move.item
            if move.is_needed:
                become_real(item, data[item.name].clone())
            if move.stage is None:
                item.tensor.data = item.tensor.data.to(item.meta.device)
                del recorder.placed[id(item.tensor)]
            else:
                item.stage, is_mine = plan.stages[move.stage], plan.is_mine(move.stage)
                was_owned, item.is_owned = item.is_owned, is_mine
                if was_owned or is_mine:
                    _settle(item, plan, move.stage, recorder)
    for name, (buffer, stage) in buffers_of_leaves(model, plan).items():
        if id(buffer) not in recorder.placed:
            item = recorder.placed[id(buffer)] = _placed(prefix + name, buffer, plan, stage, is_parameter=False)
            _settle(item, plan, stage, recorder)
    for module in model.modules():
        recorder.leaves.pop(id(module), None)
        recorder.leaf_parts.discard(id(module))
        recorder.variants = {key: leaf for key, leaf in recorder.variants.items() if key[0] != id(module)}
    recorder.keep_alive = [entry for entry in recorder.keep_alive if entry[0] is not model]
    recorder.cache.forget_leaves()
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) in recorder.placed:
            item = recorder.placed[id(tensor)]
            item.user, item.is_shared = None, False
    _make_leaves(model, recorder, plan, prefix)


def buffers_of_leaves(model: nn.Module, plan: ModelPlan) -> dict[str, tuple[torch.Tensor, int]]:
    """Maps the buffers in modules that are placed as a whole, of parts that have no place of their own, to their
    stage."""
    found: dict[str, tuple[torch.Tensor, int]] = {}
    for name, module in model.named_modules():
        stage = plan.leaf_stage[name]
        if stage is not None:
            for buffer_name, buffer in module.named_buffers(name):
                found.setdefault(buffer_name, (buffer, plan.home[stage]))
    return found


def _make_leaves(model: nn.Module, recorder: Recording, plan: ModelPlan, prefix: str) -> None:
    placed = recorder.placed
    seen: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        placed[id(parameter)].is_shared |= id(parameter) in seen
        seen.add(id(parameter))
    leaves: list[Leaf] = []
    for name, module in model.named_modules():
        stage = plan.leaf_stage[name]
        if stage is not None:
            below = [*module.parameters(), *module.buffers()]
            leaf = Leaf(
                prefix + name, module, plan.stages[stage], [placed[id(item)] for item in below if id(item) in placed]
            )
            recorder.leaves[id(module)] = leaf
            recorder.leaf_parts.update(map(id, leaf.modules))
            leaves.append(leaf)
    open_leaves(recorder.leaves.values())
    recorder.keep_alive.append((model, leaves))


def _placed(name: str, tensor: torch.Tensor, plan: ModelPlan, stage: int, *, is_parameter: bool) -> Placed:
    return Placed(name, plan.stages[stage], tensor, meta_of(tensor), plan.is_mine(stage), is_parameter, type(tensor))


def _memory_of_others(item: Placed) -> list[tuple[torch.Tensor, Placed]]:
    """Returns a parameter and its memory, if the program or a module holds that by another name, too: `p.data`, a plain
    tensor of which it is a part."""
    tensor = item.tensor
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.device.type != "cpu":
        return []
    if not is_memory_of_others(tensor, num_own=0 if CONSTRUCTION.memory_of(tensor) is None else 1):
        return []
    with DisableTorchFunction():
        return [(tensor.detach(), item)]


def _settle(item: Placed, plan: ModelPlan, stage: int, recorder: Recording) -> None:
    """Bring a tensor that is here to its device, or let a stub take its place."""
    tensor = item.tensor
    if item.is_owned:
        fill_tensor(tensor)
        move_data(tensor, plan.device_of(stage, item))
        return
    stub = StubParameter.make(item.name, item.meta, recorder, is_parameter=item.is_parameter)
    if item.is_parameter:
        stub.requires_grad_(tensor.requires_grad)
    try:
        torch.utils.swap_tensors(tensor, stub)  # whoever holds the parameter now holds the stub
    except RuntimeError as error:
        raise PlanError(
            f"the parameter {item.name} cannot be given to another rank.",
            why=f"something in this program holds a weak reference to it, or its autograd node: {error}",
            hint="call farspan.distribute(model) earlier: right after the model is built",
        ) from error
    vars(tensor).update(vars(stub))  # what the program has written on the parameter

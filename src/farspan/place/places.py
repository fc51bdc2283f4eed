"""Places a plan's owners in this program: what a plan means for a model here, at the start or while it runs."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import nn

from farspan.call.remat.repeated_blocks import repeated_blocks
from farspan.comm.router import Router
from farspan.devices import current_device, ids_of_accelerators
from farspan.errors import PlanError
from farspan.execute.engine import Engine
from farspan.execute.process.world import local_rank_to_be
from farspan.execute.teams import check_devices, team_at
from farspan.place.mesh.tensor import split_stages
from farspan.place.owners import ModelPlan, buffers_of_leaves, place
from farspan.place.repartition.migrate import place_elsewhere
from farspan.place.suitable import check_buffers, check_memory
from farspan.place.undivided import said_of, with_undivided
from farspan.place.weights import give_weights
from farspan.plan import Homes, Plan, RankDevices, Resolved, Team, layouts_of, parse_places, resolve, resolve_remat
from farspan.profile import keepers, tied
from farspan.record.surgery.real import without_weak_references
from farspan.record.team.team_tensor import SplitStage
from farspan.schedule import LEAST_WEIGHT_WORK_S
from farspan.torch_private import DisableTorchFunction

__all__ = ["devices_of_ranks", "place_first", "replace_plan"]


def place_first(engine: Engine, model: nn.Module, plan: Plan) -> None:
    """Give `model` its places; all ranks call it.

    Raises:
        PlanError: The plan does not fit the model, or the number of ranks; or two parameters are one memory, or a
            buffer and a parameter of another rank.
        DivergenceError: The ranks have different plans.
    """
    if engine.agreement_of_all.side.world_size > 1:
        check_memory(model)
    engine.takes_cpu &= all(item.device.type == "cpu" for item in (*model.parameters(), *model.buffers()))
    resolved = _resolved(engine, model, plan)
    again = _computed_again(model, plan)
    layouts = _layouts(engine, model, plan)
    engine.agreement_of_all.agree_on("plan", plan.to_json())
    try:
        check_devices(resolved.teams, engine.rank)
    except PlanError as error:  # which no other rank finds
        engine.side.fail(error)
        raise
    if engine.agreement_of_all.side.world_size > 1:
        _check_buffers(model, resolved)
    give_weights(engine, model, resolved)
    number = len(engine.recorder.roots)
    prefix = f"model{number}." if number else ""
    placed, memory_of_others = place(model, engine.recorder, resolved, prefix=prefix)
    engine.add_parameters(placed)
    split_stages(engine, model, resolved.splits, layouts, prefix, again)
    engine.groups.share_weights(placed)
    if engine.groups.shards is not None:
        with without_weak_references(model):
            engine.groups.shards.release(placed)
    with DisableTorchFunction():  # else the questions after the second one's memory would read the first one
        for memory, item in memory_of_others:
            engine.recorder.copies.add_part(memory, item, is_known=False)
    _follow(engine, plan)
    engine.executor.remat.add(model, again)


def _check_buffers(model: nn.Module, plan: ModelPlan) -> None:
    """Raise if a buffer is one memory with a parameter that is not the same rank's as a whole."""
    buffers = buffers_of_leaves(model, plan)
    check_buffers(
        model,
        [(name, buffer) for name, (buffer, _) in buffers.items()],
        lambda parameter, buffer: bool(plan.splits) or plan.owner[parameter] != buffers[buffer][1],
    )


def replace_plan(engine: Engine, model: nn.Module, plan: Plan, users: list[str]) -> int | None:
    """Give `model` other places, between two steps; all ranks call it with equal plans: `place_elsewhere`."""
    resolved = _resolved(engine, model, plan, may_idle=True)
    again = _computed_again(model, plan)
    moved_bytes = place_elsewhere(engine, model, resolved, users)
    if moved_bytes is not None:
        _follow(engine, plan)
        engine.executor = engine.plain_executor()
        engine.executor.remat.add(model, again)
    return moved_bytes


def _follow(engine: Engine, plan: Plan) -> None:
    engine.lookahead = plan.lookahead
    engine.schedule = plan.schedule
    engine.gradient_reduction = plan.gradient_reduction
    engine.least_weight_work_s = LEAST_WEIGHT_WORK_S[plan.schedule]


def _computed_again(model: nn.Module, plan: Plan) -> list[str]:
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return resolve_remat(plan.remat, names, repeated_blocks(model))


def _resolved(engine: Engine, model: nn.Module, plan: Plan, *, may_idle: bool = False) -> ModelPlan:
    resolved = _resolve(engine, model, plan, may_idle=may_idle)
    if any(len(plan.ranks_of(stage)) > 1 and not plan.is_split(stage) for stage in range(plan.num_stages)):
        plan, undivided = with_undivided(plan, model, resolved)
        if undivided:
            engine.console.warn(said_of(undivided))
            resolved = _resolve(engine, model, plan, may_idle=may_idle)
    engine.devices[:] = _told_devices(engine)
    teams = [team_at(parse_places(text), engine.devices) for text in plan.stages]
    sizes = {name: each.numel() * each.element_size() for name, each in model.named_parameters()}
    homes = Homes(teams, resolved.owner, sizes)
    split = {stage: team.members for stage, team in enumerate(teams) if plan.is_split(stage)}
    for stage, members in split.items():  # what is not split runs on the first member
        teams[stage] = homes.teams[stage] = Team(members[:1])
    stages = [engine.stage_number(team, occurrence) for team, occurrence in _occurrences(teams)]
    stages += [engine.stage_number(team, 0) for team in homes.teams[len(teams) :]]
    parts = {
        stage: SplitStage(
            home=stages[stage],
            members=tuple([engine.stage_number(Team((member,), part_of=members), 0) for member in members]),
            owners=tuple([engine.stage_number(Team((member,)), 0) for member in members]),
        )
        for stage, members in split.items()
    }
    return ModelPlan(
        owner=homes.owner,
        leaf_stage=resolved.leaf_stage,
        home=homes.first,
        stages=stages,
        teams=homes.teams,
        rank=engine.rank,
        takes_cpu=engine.takes_cpu,
        splits={name: parts[stage] for name, stage in resolved.leaf_stage.items() if stage in parts},
    )


def _told_devices(engine: Engine) -> list[RankDevices]:
    """Returns what each rank tells about its devices."""
    router = engine.transport if isinstance(engine.transport, Router) else None
    backend = "" if router is None or router.device is None else "nccl"
    own = str(current_device()), backend, local_rank_to_be(), ids_of_accelerators()
    blobs = engine.agreement.gather("devices", json.dumps(own).encode())
    return devices_of_ranks([json.loads(blob) for blob in blobs])


def devices_of_ranks(told: Sequence[tuple[str, str, int, Sequence[str]]]) -> list[RankDevices]:
    """Returns the devices of all ranks.

    A rank computes on its current device. Where all ranks of a machine have left that at the first one, each takes one
    of its own, as its number there says.

    Args:
        told: By each rank: its current device, what carries tensors between devices there, its number on its machine,
            and the devices behind its accelerators.
    """
    found: list[RankDevices] = []
    for device, backend, number, ids in told:
        kind, _, index = str(torch.device(device)).partition(":")
        is_left = all(others.endswith(":0") for others, _, _, theirs in told if not set(theirs).isdisjoint(ids))
        if ids and is_left:
            index = number % len(ids)
        own = f"{kind}:{index}" if ids else device
        found.append(RankDevices(own=own, backend=str(backend), ids=tuple(map(str, ids))))
    return found


def _resolve(engine: Engine, model: nn.Module, plan: Plan, *, may_idle: bool) -> Resolved:
    parameters, aliases = tied(model)
    return resolve(
        plan,
        parameters=parameters,
        aliases=aliases,
        modules=[name for name, _ in model.named_modules()],
        world_size=engine.num_ranks,
        indivisible=keepers(model),
        may_idle=may_idle,
    )


def _layouts(engine: Engine, model: nn.Module, plan: Plan) -> dict[str, str]:
    """Returns how matrices were asked to lie on the members of split stages, by the first name of each."""
    if not plan.tensor_layouts:
        return {}
    first = {id(item): name for name, item in model.named_parameters()}
    named = dict(model.named_parameters(remove_duplicate=False))
    found = layouts_of(
        plan,
        _resolve(engine, model, plan, may_idle=False),
        modules=[name for name, _ in model.named_modules(remove_duplicate=False)],
        matrices=[name for name, item in named.items() if item.dim() > 1],
    )
    return {first[id(named[name])]: layout for name, layout in found.items()}


def _occurrences(teams: list[Team]) -> list[tuple[Team, int]]:
    """Returns each team with how many stages before this one it runs."""
    return [(team, teams[:number].count(team)) for number, team in enumerate(teams)]

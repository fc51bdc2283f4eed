"""Who owns what in this program: what a plan means for a model here, at the start or while it runs."""

from __future__ import annotations

import torch
from torch import nn

from farspan.call.remat.repeated_blocks import repeated_blocks
from farspan.execute.engine import Engine
from farspan.execute.sites import StageSite, site_of
from farspan.place.owners import Sites, place
from farspan.place.repartition.migrate import place_elsewhere
from farspan.place.weights import give_weights
from farspan.plan import Plan, parse_place, resolve, resolve_remat
from farspan.profile import keepers, tied
from farspan.schedule import LEAST_WEIGHT_WORK_S

__all__ = ["place_first", "replace_plan"]


def place_first(engine: Engine, model: nn.Module, plan: Plan) -> None:
    """Give `model` its places; all ranks call it.

    Raises:
        PlanError: The plan does not fit the model, or the number of ranks.
        DivergenceError: The ranks have different plans.
    """
    sites = _sites(engine, model, plan)
    again = _computed_again(model, plan)
    engine.agreement.agree_on("plan", plan.to_json())
    give_weights(engine, model, sites)
    number = len(engine.recorder.roots)
    placed = place(model, engine.recorder, sites, prefix=f"model{number}." if number else "")
    engine.add_parameters(placed)
    _follow(engine, plan)
    engine.executor.remat.add(model, again)


def replace_plan(engine: Engine, model: nn.Module, plan: Plan) -> int | None:
    """Give `model` other places, between two steps; all ranks call it with equal plans.

    Returns:
        Bytes of parameters that have gone to another rank; None where nothing has changed, since something still uses a
        parameter that would.
    """
    sites = _sites(engine, model, plan, may_idle=True)
    again = _computed_again(model, plan)
    moved_bytes = place_elsewhere(engine, model, sites)
    if moved_bytes is not None:
        _follow(engine, plan)
        engine.executor = engine.plain_executor()
        engine.executor.remat.add(model, again)
    return moved_bytes


def _follow(engine: Engine, plan: Plan) -> None:
    engine.lookahead = plan.lookahead
    engine.schedule = plan.schedule
    engine.least_weight_work_s = LEAST_WEIGHT_WORK_S[plan.schedule]


def _computed_again(model: nn.Module, plan: Plan) -> list[str]:
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return resolve_remat(plan.remat, names, repeated_blocks(model))


def _sites(engine: Engine, model: nn.Module, plan: Plan, *, may_idle: bool = False) -> Sites:
    parameters, aliases = tied(model)
    resolved = resolve(
        plan,
        parameters=parameters,
        aliases=aliases,
        modules=[name for name, _ in model.named_modules()],
        world_size=engine.num_ranks,
        indivisible=keepers(model),
        may_idle=may_idle,
    )
    sites = [site_of(parse_place(text)) for text in plan.stages]
    return Sites(
        owner=resolved.owner,
        leaf_stage=resolved.leaf_stage,
        stages=[engine.stage_number(site, occurrence) for site, occurrence in _occurrences(sites)],
        is_mine=[site.rank == engine.rank for site in sites],
        devices=[site.device for site in sites],
    )


def _occurrences(sites: list[StageSite]) -> list[tuple[StageSite, int]]:
    """Each site with how many stages before it have the same rank and device."""
    seen: dict[tuple[int, torch.device], int] = {}
    result: list[tuple[StageSite, int]] = []
    for site in sites:
        key = (site.rank, site.device)
        result.append((site, seen.get(key, 0)))
        seen[key] = seen.get(key, 0) + 1
    return result

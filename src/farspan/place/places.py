"""Who owns what in this program: what a plan means for a model here, at the start or while it runs."""

from __future__ import annotations

from torch import nn

from farspan.call.remat.repeated_blocks import repeated_blocks
from farspan.execute.engine import Engine
from farspan.execute.teams import team_at
from farspan.place.owners import ModelPlan, place
from farspan.place.repartition.migrate import place_elsewhere
from farspan.place.weights import give_weights
from farspan.plan import Plan, Team, parse_place, resolve, resolve_remat
from farspan.profile import keepers, tied
from farspan.schedule import LEAST_WEIGHT_WORK_S

__all__ = ["place_first", "replace_plan"]


def place_first(engine: Engine, model: nn.Module, plan: Plan) -> None:
    """Give `model` its places; all ranks call it.

    Raises:
        PlanError: The plan does not fit the model, or the number of ranks.
        DivergenceError: The ranks have different plans.
    """
    resolved = _resolved(engine, model, plan)
    again = _computed_again(model, plan)
    engine.agreement_of_all.agree_on("plan", plan.to_json())
    give_weights(engine, model, resolved)
    number = len(engine.recorder.roots)
    placed = place(model, engine.recorder, resolved, prefix=f"model{number}." if number else "")
    engine.add_parameters(placed)
    engine.groups.share_weights(placed)
    _follow(engine, plan)
    engine.executor.remat.add(model, again)


def replace_plan(engine: Engine, model: nn.Module, plan: Plan) -> int | None:
    """Give `model` other places, between two steps; all ranks call it with equal plans.

    Returns:
        Bytes of parameters that have gone to another rank; None where nothing has changed, since something still uses a
        parameter that would.
    """
    resolved = _resolved(engine, model, plan, may_idle=True)
    again = _computed_again(model, plan)
    moved_bytes = place_elsewhere(engine, model, resolved)
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


def _resolved(engine: Engine, model: nn.Module, plan: Plan, *, may_idle: bool = False) -> ModelPlan:
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
    teams = [team_at(parse_place(text)) for text in plan.stages]
    return ModelPlan(
        owner=resolved.owner,
        leaf_stage=resolved.leaf_stage,
        stages=[engine.stage_number(team, occurrence) for team, occurrence in _occurrences(teams)],
        teams=teams,
        rank=engine.rank,
    )


def _occurrences(teams: list[Team]) -> list[tuple[Team, int]]:
    """Each team with how many stages before this one it runs."""
    return [(team, teams[:number].count(team)) for number, team in enumerate(teams)]

"""What a user calls: distribute a model, look at its plan, run what is queued."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from farspan.errors import PlanError
from farspan.lazy import place
from farspan.plan import Plan, parse_place, resolve
from farspan.planner import auto_plan
from farspan.profile import atoms, tied
from farspan.runtime.engine import StageSite
from farspan.runtime.optimizers import watch_optimizers
from farspan.runtime.step.observe import StepRecord
from farspan.runtime.world import current_engine, engine_of_this_thread

__all__ = ["distribute", "flush", "last_step", "plan_of"]

_PLAN = "_farspan_plan"


def distribute(
    model: nn.Module,
    *,
    plan: str | os.PathLike[str] | Plan | Mapping[str, str] = "auto",
    stages: int | str = "auto",
    seed: int = 0,
) -> nn.Module:
    """Split `model` over the ranks of this program and return it: same object, same class, same state_dict keys.

    Every rank calls it alike, and then runs the training loop it would run alone. Under a launcher (`farspan run`,
    torchrun, anything that sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) torch.distributed is set up if it was not;
    without one the world is one rank.

    Args:
        model: Any module, built alike on every rank.
        plan: "auto"; a `Plan`; the path of a plan's JSON file; or a mapping from names of modules or parameters (or
            glob patterns of them) to "rank:R" or "rank:R/device".
        stages: How many pipeline stages an automatic plan has; one for each rank by default.
        seed: Of the dropout masks and other random numbers drawn inside the model.

    Returns:
        `model` itself.

    Raises:
        PlanError: The plan does not fit the model or the number of ranks.
        LaunchError: The other ranks cannot be found.

    Example:
        >>> import torch, farspan
        >>> model = farspan.distribute(torch.nn.Linear(4, 2))
        >>> model(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"distribute takes a torch.nn.Module, not a {type(model).__name__}.",
            hint="model = farspan.distribute(model)",
        )
    if hasattr(model, _PLAN):
        raise PlanError("this model has been distributed already.", hint="call farspan.distribute(model) once")
    engine = engine_of_this_thread(seed)
    chosen = _choose_plan(model, plan, stages, engine.num_ranks)
    parameters, aliases = tied(model)
    resolved = resolve(
        chosen,
        parameters=parameters,
        aliases=aliases,
        modules=[name for name, _ in model.named_modules()],
        world_size=engine.num_ranks,
    )
    engine.agreement.agree_on("plan", chosen.to_json())
    engine.agreement.agree_on(
        "model", "\n".join(f"{name} {tuple(item.shape)}" for name, item in model.named_parameters())
    )
    sites = [_site(text) for text in chosen.stages]
    numbers = [engine.stage_number(site, occurrence) for site, occurrence in _occurrences(sites)]
    number = len(engine.recorder.roots)
    placed = place(
        model,
        engine.recorder,
        owner=resolved.owner,
        leaf_stage=resolved.leaf_stage,
        stages=numbers,
        is_mine=[site.rank == engine.rank for site in sites],
        devices=[site.device for site in sites],
        prefix=f"model{number}." if number else "",
    )
    engine.lookahead = chosen.lookahead
    engine.add_parameters(placed)
    watch_optimizers()
    object.__setattr__(model, _PLAN, chosen)
    engine.agreement.share_generators()
    engine.console.show_plan(chosen)
    return model


def plan_of(model: nn.Module) -> Plan:
    """The plan a distributed model runs under: prints as a table; `save(path)` writes JSON that can be edited."""
    plan = getattr(model, _PLAN, None)
    if plan is None:
        raise PlanError("this model has not been distributed.", hint="model = farspan.distribute(model)")
    return plan


def flush() -> None:
    """Run all that has been recorded. Every rank must call it; the loop needs it only to time or to free memory."""
    engine = current_engine()
    if engine is not None:
        engine.flush("farspan.flush()")


def last_step() -> StepRecord | None:
    """How the last step ran (duration, bubble), once one has run. Every rank has it."""
    engine = current_engine()
    return None if engine is None else engine.last_training_step


def _choose_plan(model: nn.Module, plan: Any, stages: int | str, num_ranks: int) -> Plan:
    if stages != "auto" and (not isinstance(stages, int) or isinstance(stages, bool) or stages < 1):
        raise PlanError(f"stages={stages!r} is not a number of stages.", hint='stages="auto", or an integer from 1')
    if isinstance(plan, str) and plan == "auto":
        num_stages = num_ranks if isinstance(stages, str) else stages
        return auto_plan(
            atoms(model, num_stages), num_stages=num_stages, devices=[f"rank:{rank}" for rank in range(num_ranks)]
        )
    if isinstance(plan, Plan):
        chosen = plan
    elif isinstance(plan, Mapping):
        chosen = Plan.from_mapping(plan)
    elif isinstance(plan, (str, os.PathLike)):
        chosen = Plan.load(Path(plan))
    else:
        raise PlanError(
            f"plan={plan!r} is no plan.",
            hint='plan="auto", a farspan.Plan, the path of its JSON file, or a mapping of names',
        )
    if isinstance(stages, int) and stages != chosen.num_stages:
        raise PlanError(
            f"stages={stages} was asked for, the plan has {chosen.num_stages}.",
            hint="leave out one of plan= and stages=",
        )
    return chosen


def _site(text: str) -> StageSite:
    spot = parse_place(text)
    if spot.device is not None:
        return StageSite(spot.rank, torch.device(spot.device))
    if torch.cuda.is_available():
        return StageSite(spot.rank, torch.device("cuda", torch.cuda.current_device()))
    return StageSite(spot.rank, torch.device("cpu"))


def _occurrences(sites: list[StageSite]) -> list[tuple[StageSite, int]]:
    """Each site with how many stages before it have the same rank and device."""
    seen: dict[tuple[int, torch.device], int] = {}
    result: list[tuple[StageSite, int]] = []
    for site in sites:
        key = (site.rank, site.device)
        result.append((site, seen.get(key, 0)))
        seen[key] = seen.get(key, 0) + 1
    return result

"""The plan that `farspan.distribute` is asked for: made here, or read, and what is wanted of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from farspan.errors import PlanError
from farspan.plan import Plan
from farspan.planner import Hints, auto_plan
from farspan.profile import units_of

__all__ = ["choose_plan", "hints_of"]


def hints_of(
    plan: Any, *, pins: Any, together: Any, max_memory: Any, stages: Any, remat: bool | Sequence[str] | None
) -> Hints:
    """Returns the hints that the arguments of `farspan.distribute` give for an automatic plan.

    Raises:
        PlanError: They are given beside a plan of the user's own.
    """
    hints = Hints(
        pins={} if pins is None else pins,
        together=together,
        max_memory=max_memory,
        stages=None if stages == "auto" else stages,
        remat=remat,
    )
    if hints.are_about_places and plan != "auto":
        raise PlanError(
            "pins, together and max_memory are for automatic plans.",
            why="plan= says where everything lies.",
            hint='leave out plan=, or change the plan: "head": "rank:1"',
        )
    return hints


def choose_plan(model: nn.Module, plan: Any, hints: Hints, num_ranks: int, split_places: Sequence[str] = ()) -> Plan:
    """Returns the plan that `plan`, an argument of `farspan.distribute`, stands for: an automatic one is an estimate.

    Args:
        model: For which.
        plan: The argument.
        hints: For an automatic plan.
        num_ranks: How many there are.
        split_places: The places of an automatic plan's stages, if their members run each layer together.

    Raises:
        PlanError: It is none, or contradicts the hints.
    """
    if isinstance(plan, str) and plan == "auto":
        places = split_places or [f"rank:{rank}" for rank in range(num_ranks)]
        num_stages = len(places) if hints.stages is None else hints.stages
        return auto_plan(
            units_of(model, num_stages, hints.patterns), num_stages=num_stages, devices=places, hints=hints
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
    if hints.stages is not None and hints.stages != chosen.num_stages:
        raise PlanError(
            f"stages={hints.stages} was asked for, the plan has {chosen.num_stages}.",
            hint="leave out one of plan= and stages=",
        )
    return chosen

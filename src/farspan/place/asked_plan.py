"""The plan that `farspan.distribute` is asked for: made here, or read, and what is wanted of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import nn

from farspan.errors import PlanError, quoted
from farspan.plan import Plan
from farspan.planner import Hints, auto_plan
from farspan.profile import units_of

__all__ = ["check_seed", "check_wide", "choose_plan", "hints_of"]

_OWN_WIDTHS = 'leave it out, or write wide stages yourself: plan={"blocks.*": "rank:0+rank:1", "head": "rank:2"}'


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
        stages=None if stages in ("auto", "wide") else stages,
        remat=remat,
    )
    if hints.are_about_places and plan != "auto":
        raise PlanError(
            "pins, together and max_memory are for automatic plans.",
            why="plan= says where everything lies.",
            hint='leave out plan=, or change the plan: "head": "rank:1"',
        )
    if stages == "wide" and (hints.are_about_places or remat is not None or plan != "auto"):
        raise PlanError(
            'stages="wide" is for automatic plans of which nothing else is asked.',
            why="pins, together, max_memory, remat or plan= was given, too.",
            hint=_OWN_WIDTHS,
        )
    return hints


def check_wide(*, is_open: bool, is_measured: bool) -> None:
    """Raise if stages="wide" would be without effect.

    Args:
        is_open: Whether the plan is automatic, for one group.
        is_measured: Whether its first step is measured.

    Raises:
        PlanError: It would.
    """
    if not (is_open and is_measured):
        raise PlanError(
            'stages="wide" needs a first step that is measured.',
            why="measure=False or FARSPAN_MEASURE=0 says that none is."
            if is_open
            else "there are groups (data_parallel=), or layers are split (tensor_parallel=).",
            hint=_OWN_WIDTHS,
        )


def check_seed(seed: Any) -> None:
    """Raise unless it is None or a whole number."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, Integral)):
        raise PlanError(
            f"seed={quoted(seed)} is no seed.",
            why=f"a seed is a whole number; this is of type {type(seed).__name__}.",
            hint="farspan.distribute(model, seed=0)",
        )


def choose_plan(
    model: nn.Module,
    plan: Any,
    hints: Hints,
    num_ranks: int,
    split_places: Sequence[str] = (),
    *,
    may_be_wide: bool = False,
) -> Plan:
    """Returns the plan that `plan`, an argument of `farspan.distribute`, stands for: an automatic one is an estimate.

    Args:
        model: For which.
        plan: The argument.
        hints: For an automatic plan.
        num_ranks: How many there are.
        split_places: The places of an automatic plan's stages, if their members run each layer together.
        may_be_wide: Whether a model of fewer units than there are ranks gets wide stages.

    Raises:
        PlanError: It is none, or contradicts the hints.
    """
    if isinstance(plan, str) and plan == "auto":
        places = split_places or [f"rank:{rank}" for rank in range(num_ranks)]
        num_stages = len(places) if hints.stages is None else hints.stages
        units = units_of(model, num_stages, hints.patterns)
        if may_be_wide:
            num_stages = max(1, min(num_stages, len(units)))
        return auto_plan(units, num_stages=num_stages, devices=places, hints=hints)
    if isinstance(plan, Plan):
        chosen = plan
    elif isinstance(plan, Mapping):
        chosen = Plan.from_mapping(plan)
    elif isinstance(plan, (str, os.PathLike)):
        chosen = Plan.load(Path(plan))
    else:
        raise PlanError(
            f"plan={quoted(plan)} is no plan.",
            why=f"a {type(plan).__name__} does not say which module lies where.",
            hint='plan="auto", a farspan.Plan, the path of its JSON file, or a mapping of names',
        )
    if hints.stages is not None and hints.stages != chosen.num_stages:
        raise PlanError(
            f"stages={hints.stages} was asked for, the plan has {chosen.num_stages}.",
            why="stages= is for automatic plans.",
            hint="leave out one of plan= and stages=",
        )
    return chosen

"""The tensor axis: stages whose members run each layer together.

tensor_parallel=2 on 4 ranks     stage 0  rank:0&rank:1     stage 1  rank:2&rank:3
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from farspan.errors import PlanError
from farspan.execute.engine import Engine
from farspan.plan import Plan
from farspan.record.team.calls import open_split
from farspan.record.team.team_tensor import SplitStage

__all__ = ["check_tensor_parallel", "places_of", "said_of", "split_stages", "with_sums"]


def check_tensor_parallel(value: Any, plan: Any, **others: Any) -> None:
    """Raise if the argument of `farspan.distribute` is none, or goes with none of the others that are given.

    Raises:
        PlanError: It says which.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(
            f"tensor_parallel={value!r} is no number of ranks.",
            why="it says how many ranks run each layer together; nothing chooses it yet.",
            hint="tensor_parallel=2",
        )
    given = [name for name, other in others.items() if other]
    if not (isinstance(plan, str) and plan == "auto"):
        given.append("plan")
    if value > 1 and given:
        raise PlanError(
            f"tensor_parallel={value} with {given[0]}=.",
            why="it is for automatic plans, of which nothing else is asked; in a plan of your own a stage of two ranks"
            '\nthat run each layer together is "rank:0&rank:1".',
            hint=f"leave out {given[0]}=, or tensor_parallel=",
        )


def places_of(num_ranks: int, tensor_parallel: int | None, stages: Any) -> list[str]:
    """Returns the places of the stages of so many ranks; none where no layer is to be split.

    Raises:
        PlanError: The ranks cannot be divided so, or `stages` asks for another number.
    """
    if tensor_parallel is None or tensor_parallel == 1:
        return []
    num_stages, rest = divmod(num_ranks, tensor_parallel)
    if rest or not num_stages:
        raise PlanError(
            f"tensor_parallel={tensor_parallel} does not divide {num_ranks} rank{'s' * (num_ranks != 1)}.",
            why="each stage has as many ranks, which run each of its layers together.",
            hint=f"farspan run -n {tensor_parallel * max(num_stages, 1)} train.py",
        )
    if stages not in ("auto", num_stages):
        number = stages * tensor_parallel if type(stages) is int and stages > 0 else num_ranks
        raise PlanError(
            f"stages={stages!r} with tensor_parallel={tensor_parallel} on {num_ranks} ranks.",
            why=f"{num_ranks} ranks are {num_stages} stages of {tensor_parallel} ranks.",
            hint=f"leave out stages=, or: farspan run -n {number} train.py",
        )
    return [
        "&".join(f"rank:{stage * tensor_parallel + number}" for number in range(tensor_parallel))
        for stage in range(num_stages)
    ]


def with_sums(plan: Plan, gradient_reduction: str | None) -> Plan:
    """Returns the plan as it can be run: gradients of split layers are sums.

    Raises:
        PlanError: They are to be added up in the order of one process, or something is to be computed again.
    """
    if not any(map(plan.is_split, range(plan.num_stages))):
        return plan
    if gradient_reduction == "exact" or plan.remat:
        what = "remat" if plan.remat else 'gradient_reduction="exact"'
        raise PlanError(
            f"{what} with a stage whose ranks run each layer together.",
            why="nothing is computed again there yet."
            if plan.remat
            else "members add up what each has, which rounds otherwise than one process.",
            hint="leave it out",
        )
    return dataclasses.replace(plan, gradient_reduction="sum")


def split_stages(engine: Engine, model: nn.Module, stages: Mapping[str, SplitStage], prefix: str) -> None:
    """Let the modules of split stages be recorded part by part, and say once what that has come to."""
    if not stages:
        return
    open_split(engine.recorder, model, stages)
    is_said = False

    def say() -> None:
        nonlocal is_said
        matrices = engine.recorder.splitting.matrices
        names = [prefix + name for name, _ in model.named_parameters()]
        if not is_said and not matrices.split.keys().isdisjoint(names):
            is_said = True
            engine.console.say(said_of({name: matrices.form_of(name) for name in names}))

    engine.after_step.append(say)


def said_of(forms: Mapping[str, tuple[str, str]]) -> str:
    """Returns one line on how the matrices of split stages are split, and why some are not.

    Args:
        forms: By name of a parameter "column", "row" or "whole", and why; "" where it is in no product.
    """
    numbers = {form: sum(each == form for each, _ in forms.values()) for form in ("column", "row", "whole")}
    said = f"tensor axis: {numbers['column']} matrices split by columns, {numbers['row']} by rows"
    reasons: dict[str, list[str]] = {}
    for name, (form, reason) in forms.items():
        if form == "whole":
            reasons.setdefault(reason, []).append(name)
    if not reasons:
        return said
    whys = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {why}" for why, names in reasons.items()
    ]
    return f"{said}, {numbers['whole']} whole ({'; '.join(whys)})"

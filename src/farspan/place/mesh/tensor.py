"""The tensor axis: stages whose members run each layer together.

tensor_parallel=2 on 4 ranks     stage 0  rank:0&rank:1     stage 1  rank:2&rank:3
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from farspan.errors import PlanError
from farspan.execute.engine import Engine
from farspan.plan import Plan
from farspan.record.team.calls import open_split
from farspan.record.team.team_tensor import SplitStage

__all__ = ["said_of", "split_stages", "unmet_of", "with_sums"]


def with_sums(plan: Plan, gradient_reduction: str | None) -> Plan:
    """Returns the plan as it can be run: gradients of split layers are sums.

    Raises:
        PlanError: They are to be added up in the order of one process.
    """
    if not any(map(plan.is_split, range(plan.num_stages))):
        return plan
    if gradient_reduction == "exact":
        raise PlanError(
            'gradient_reduction="exact" with a stage whose ranks run each layer together.',
            why="members add up what each has, which rounds otherwise than one process.",
            hint="leave it out",
        )
    return dataclasses.replace(plan, gradient_reduction="sum")


def split_stages(
    engine: Engine,
    model: nn.Module,
    stages: Mapping[str, SplitStage],
    layouts: Mapping[str, str],
    prefix: str,
    again: Sequence[str],
) -> None:
    """Let the modules of split stages be recorded part by part, and say once what that has come to.

    Args:
        engine: This rank's.
        model: Which has been placed.
        stages: By name of a module, the split stage that it lies on.
        layouts: By name of a matrix, how it was asked to lie on the members.
        prefix: Of the model's names.
        again: Names of the modules that are computed again in the backward.
    """
    if not stages:
        return
    matrices = engine.recorder.splitting.matrices
    engine.recorder.splitting.again.update(id(part) for name in again for part in model.get_submodule(name).modules())
    matrices.ask({prefix + name: layout for name, layout in layouts.items()})
    open_split(engine.recorder, model, stages)
    engine.executor.remat.has_operations = True
    is_said = False

    def say() -> None:
        nonlocal is_said
        names = [prefix + name for name, _ in model.named_parameters()]
        if not is_said and not matrices.split.keys().isdisjoint(names):
            is_said = True
            engine.console.say(said_of({name: matrices.form_of(name) for name in names}, matrices.gathered_for))
            asked = dict.fromkeys(sorted(matrices.by_positions), "sequence") | matrices.asked
            unmet = unmet_of({name: (layout, *matrices.form_of(name)) for name, layout in asked.items()})
            if unmet:
                engine.console.warn(unmet)

    engine.after_step.append(say)


def unmet_of(found: Mapping[str, tuple[str, str, str]]) -> str:
    """Returns what the user should know of matrices that do not lie as asked; "" where all do.

    Args:
        found: By name of a matrix what was asked, how it is split ("" if it is in no product), and why it is whole.
    """
    unmet: list[str] = []
    for name, (asked, form, why) in found.items():
        if asked == "sequence" and form != "row":
            continue  # it is about sums, of which no other matrix has any
        if form != asked:
            reason = why or (f"it is split as {form}" if form else "no product that can be split takes it")
            if (asked, form) == ("vocab", "column"):
                reason = "no loss over words reads what it gives"
            if asked == "sequence":
                reason = "its sums have fewer positions than there are ranks, or are those of a convolution"
            unmet.append(f"{name} is not split as asked ({asked}): {reason}")
    if not unmet:
        return ""
    return f"farspan: tensor_parallel: {'; '.join(unmet[:3])}{f'; and {len(unmet) - 3} more' * (len(unmet) > 3)}"


def said_of(forms: Mapping[str, tuple[str, str]], gathered_for: Collection[str] = ()) -> str:
    """Returns one line on how the matrices of split stages are split, and why some are not.

    Args:
        forms: By name of a parameter "column", "row", "sequence", "vocab" or "whole", and why; "" where it is in no
            product.
        gathered_for: Names of operations that need all positions of sums that are divided along the sequence.
    """
    numbers = Counter(form for form, _ in forms.values())
    said = f"tensor axis: {numbers['column']} matrices split by columns, {numbers['row'] + numbers['sequence']} by rows"
    if numbers["sequence"]:
        said += f" (sums of {numbers['sequence']} divided along the sequence"
        said += f", gathered for {', '.join(sorted(gathered_for))})" if gathered_for else ")"
    if numbers["vocab"]:
        said += f", {numbers['vocab']} by vocabulary"
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

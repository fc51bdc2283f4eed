"""Finds what a wide stage does not divide: modules that one of its members runs in all micro-batches.

    stage 0   rank:0+rank:1   conv    norm     conv
    runs on   micro-batch 0   rank 0  rank 0   rank 0
              micro-batch 1   rank 1  rank 0   rank 1

Running statistics pass from one micro-batch to the next, in the loop's order; a sparse gradient is not sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from farspan.plan import Plan, Resolved, format_place, parse_places
from farspan.profile import keeps_statistics

__all__ = ["has_undivided", "said_of", "with_undivided"]


def has_undivided(model: nn.Module) -> bool:
    """Returns whether some module of it is such a one."""
    return any(map(_is_undivided, model.modules()))


def with_undivided(plan: Plan, model: nn.Module, resolved: Resolved) -> tuple[Plan, list[str]]:
    """Returns the plan with such modules on stages of their own, one for each member; and their names.

    Args:
        plan: With wide stages.
        model: Its modules.
        resolved: What the plan means for them.
    """
    stages: list[str] = []
    placement: dict[str, int] = {}
    num_of: dict[int, int] = {}
    for name, module in model.named_modules():
        stage = resolved.leaf_stage[name]
        if stage is None or len(plan.ranks_of(stage)) == 1 or not _is_undivided(module):
            continue
        members = parse_places(plan.stages[stage])
        number = num_of[stage] = num_of.get(stage, -1) + 1
        place = format_place(members[number % len(members)])
        if place not in stages:
            stages.append(place)
        placement[name] = plan.num_stages + stages.index(place)
    if not placement:
        return plan, []
    placed = {**plan.placement, **placement}
    return dataclasses.replace(plan, stages=(*plan.stages, *stages), placement=placed, estimates={}), list(placement)


def said_of(names: Sequence[str]) -> str:
    """Returns what the user should know of them."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"farspan: {names[0]}{more} on a wide stage: one rank runs it in all micro-batches, in their order, "
        "for it keeps running statistics or has sparse gradients."
    )


def _is_undivided(module: nn.Module) -> bool:
    has_sparse_gradient = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    return has_sparse_gradient or keeps_statistics(module)

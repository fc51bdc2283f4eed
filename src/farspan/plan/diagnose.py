"""Makes the errors of `farspan.plan.resolve`: why a plan does not fit a model or a world."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from farspan.errors import PlanError
from farspan.plan.plan import Plan
from farspan.units import count_of

__all__ = [
    "is_not_split",
    "layout_not_found",
    "means_no_matrix",
    "module_not_found",
    "name_not_found",
    "nobody_owns",
    "not_found",
    "ranks_do_not_fit",
]

_MOST_NAMES = 4


def ranks_do_not_fit(plan: Plan, world_size: int, *, may_idle: bool = False) -> PlanError | None:
    """Returns the error for a plan whose ranks are not those of the world, all of them unless some `may_idle`; or
    None."""
    ranks, needed = plan.ranks, max(plan.ranks) + 1
    absent = [f"rank:{rank}" for rank in range(world_size) if rank not in ranks]
    has_gaps = len(ranks) < needed
    hint = "number the plan's ranks from 0, without gaps" if has_gaps else f"farspan run -n {needed} train.py"
    processes = count_of(world_size, "process")
    mismatch = f"{processes} for a plan of {count_of(len(ranks), 'rank')}"
    for stage, text in enumerate(plan.stages):
        if max(plan.ranks_of(stage)) >= world_size:
            entries = _listed([name for name, number in plan.placement.items() if number == stage])
            return PlanError(
                f"stage {stage} of the plan ({entries}) is on '{text}', a rank that does not exist.",
                why=f"{mismatch}; the ranks here are {_listed([f'rank:{rank}' for rank in range(world_size)])}.",
                hint=hint,
            )
    if absent and not may_idle:
        return PlanError(
            f"{mismatch}.",
            why=f"every rank must have a stage; the plan has none on {_listed(absent)}.",
            hint=hint,
        )
    return None


def name_not_found(entry: str, nodes: Sequence[str], plan: Plan) -> PlanError:
    """Returns the error for an entry that matches nothing in the model."""
    place = plan.stages[plan.placement[entry]]
    return not_found(
        entry,
        nodes,
        f"the plan's entry '{entry}' (on {place}) matches nothing in this model.",
        "module or parameter",
    )


def module_not_found(entry: str, modules: Sequence[str]) -> PlanError:
    """Returns the error for a name in `remat` that matches no module of the model."""
    return not_found(entry, modules, f"remat: '{entry}' matches no module of this model.", "module")


def layout_not_found(entry: str, nodes: Sequence[str]) -> PlanError:
    """Returns the error for a name in `tensor_layouts` that matches nothing in the model."""
    return not_found(entry, nodes, f"tensor_parallel: '{entry}' matches nothing in this model.", "module or parameter")


def means_no_matrix(entry: str, matrices: Sequence[str]) -> PlanError:
    """Returns the error for a name in `tensor_layouts` that means no parameter of two or more dimensions."""
    return PlanError(
        f"tensor_parallel: '{entry}' means no matrix.",
        why="matrices and weights of convolutions are split over the ranks of a stage; biases go with them.",
        hint=f"one of {_listed(matrices)}",
    )


def is_not_split(entry: str, plan: Plan, stage: int) -> PlanError:
    """Returns the error for a name in `tensor_layouts` that means what one rank runs."""
    place = plan.stages[stage]
    return PlanError(
        f"tensor_parallel: '{entry}' lies on stage {stage}, which {place} runs alone.",
        why="only the ranks of a split stage have parts of a matrix each.",
        hint=f'"{place}&rank:{plan.num_ranks}" in the place of "{place}"; or leave {entry} out',
    )


def not_found(entry: str, names: Sequence[str], what: str, kinds: str) -> PlanError:
    """Returns the error `what` for an entry that matches none of `names`, which are names of `kinds`; with the
    nearest."""
    stem = entry.strip("*?.")
    near = difflib.get_close_matches(stem or entry, names, n=3, cutoff=0.5)
    children = [name for name in names if name and "." not in name]
    pattern = "a name of this pattern" if any(sign in entry for sign in "*?[") else "this name"
    return PlanError(
        what,
        why=f"no {kinds} has {pattern}; the model's children are {_listed(children)}.",
        hint=f"nearest: {', '.join(map(repr, near))}" if near else "print([name for name, _ in model.named_modules()])",
    )


def nobody_owns(missing: Sequence[str], parameters: Sequence[str], plan: Plan, idle: Sequence[int] = ()) -> PlanError:
    """Returns the error for parameters that no entry covers.

    Args:
        missing: These parameters.
        parameters: All.
        plan: Whose entries.
        idle: The ranks that have no stage, and must have one.
    """
    left = set(missing)
    entries: list[str] = []
    for name in missing:
        if any(f"{name}.".startswith(f"{entry}.") for entry in entries):
            continue
        # The widest module around it of which no parameter is covered: one entry for many names.
        depth = next(
            depth
            for depth in range(1, name.count(".") + 2)
            if left.issuperset(other for other in parameters if f"{other}.".startswith(_prefix(name, depth)))
        )
        entries.append(_prefix(name, depth)[:-1])
    where = f"rank:{idle[0]}" if idle else plan.stages[-1]
    stage = f"where there is no stage yet: {_listed([f'rank:{rank}' for rank in idle])}" if idle else ""
    shown = ", ".join([f'"{entry}": "{where}"' for entry in entries[:_MOST_NAMES]])
    return PlanError(
        f"no stage owns the parameter '{missing[0]}'."
        if len(missing) == 1
        else f"no stage owns {len(missing)} parameters.",
        why=f"the plan's entries do not cover {len(missing)} of {len(parameters)} parameters: {_listed(missing)}.",
        hint=f"add {shown}{', ...' * (len(entries) > _MOST_NAMES)} to the plan "
        f"({stage or f'stage {plan.num_stages - 1}'}),\n"
        f'or "": "{where}" for all that no other entry covers',
    )


def _prefix(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth]) + "."


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown or "none"

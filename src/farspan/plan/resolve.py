"""Resolves a plan for one model: the stage of every parameter, and which modules are leaves.

Nodes are the modules, parameters and further names of tied parameters, as a tree of dotted names:

    entry            node            stage
    "": 0            blocks          0      inherited from the whole model
    "blocks.*": 1    blocks.3        1      its own entry beats what it inherits
                     blocks.3.mlp    1      inherited: a glob counts at the outermost names it matches
    "blocks.0": 0    blocks.0        0      an exact name beats a glob; among globs the later wins

A glob counts at the outermost names only, for "*" also matches dots: else "blocks.*" would match `blocks.0.mlp` itself
and take it away from "blocks.0". All of this is a function of values that are equal on every rank, errors included.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import TypeVar

from farspan.errors import PlanError
from farspan.plan.diagnose import (
    is_not_split,
    layout_not_found,
    means_no_matrix,
    name_not_found,
    nobody_owns,
    ranks_do_not_fit,
)
from farspan.plan.plan import Plan

__all__ = ["Resolved", "assign", "layouts_of", "matched", "outermost", "resolve", "with_ancestors"]

_MIXED = -1
_Owner = TypeVar("_Owner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A plan applied to the names of one model.

    Attributes:
        name_stage: Stage of every parameter's name, further names of tied parameters included.
        owner: Stage that owns each parameter, by its first name.
        leaf_stage: Stage that wholly owns a module, by name; None for what straddles stages and for modules without
            parameters that the plan places nowhere.
    """

    name_stage: dict[str, int]
    owner: dict[str, int]
    leaf_stage: dict[str, int | None]


def resolve(
    plan: Plan,
    *,
    parameters: Sequence[str],
    aliases: Mapping[str, str],
    modules: Sequence[str],
    world_size: int,
    indivisible: Collection[str] = (),
    may_idle: bool = False,
) -> Resolved:
    """Find out what `plan` means for a model.

    Args:
        plan: The plan.
        parameters: Name of every parameter, in the model's order; of a tied one its first name.
        aliases: Further name of a tied parameter to its first name.
        modules: Names of all modules, "" included, parents before children.
        world_size: How many processes there are.
        indivisible: Modules that are called as a whole though they have no parameters: where the plan says nothing of
            one, it goes with the parameter before it, else with the first one.
        may_idle: Whether there may be processes without a stage.

    Raises:
        PlanError: An entry matches nothing, a parameter has no owner, or the ranks do not fit the world.

    Example:
        >>> plan = Plan.from_mapping({"embed": "rank:0", "head": "rank:1"})
        >>> found = resolve(plan, parameters=["embed.weight"], aliases={"head.weight": "embed.weight"},
        ...                 modules=["", "embed", "head"], world_size=2)
        >>> found.owner, found.leaf_stage
        ({'embed.weight': 0}, {'': None, 'embed': 0, 'head': 1})
    """
    nodes = with_ancestors([*modules, *parameters, *aliases])
    assigned = assign(plan.placement, nodes, lambda entry: name_not_found(entry, nodes, plan))
    error = ranks_do_not_fit(plan, world_size, may_idle=may_idle)
    owner, name_stage = _own(assigned, parameters, aliases)
    missing = [name for name in parameters if name not in owner]
    if error is not None and not (missing and max(plan.ranks) < world_size):  # what is missing may be on other ranks
        raise error
    if missing:
        idle = [] if may_idle else [rank for rank in range(world_size) if rank not in plan.ranks]
        raise nobody_owns(missing, parameters, plan, idle)
    stage_of_module = {_parent(name): stage for name, stage in owner.items()}
    last = next(iter(owner.values()), None)
    for name in modules:
        last = stage_of_module.get(name, last)
        if name in indivisible and assigned[name] is None:
            assigned[name] = last
    status = _status([name for name in nodes if name not in name_stage], name_stage, assigned)
    return Resolved(
        name_stage=name_stage,
        owner=owner,
        leaf_stage={name: None if status[name] == _MIXED else status[name] for name in modules},
    )


def layouts_of(plan: Plan, resolved: Resolved, *, modules: Sequence[str], matrices: Sequence[str]) -> dict[str, str]:
    """Find out how the matrices of split stages are asked to lie on the members.

    Args:
        plan: The plan.
        resolved: What it means for the model.
        modules: Names of all modules.
        matrices: Names of the parameters of two or more dimensions; of a tied one all its names.

    Returns:
        "column", "row", "sequence", "vocab" or "whole" by the name of a matrix; nothing where no stage is split.

    Raises:
        PlanError: An entry matches nothing or means no matrix, or asks to split what one rank runs.
    """
    if not any(map(plan.is_split, range(plan.num_stages))):
        return {}
    nodes = with_ancestors([*modules, *resolved.name_stage])
    asked = assign(plan.tensor_layouts, nodes, lambda entry: layout_not_found(entry, nodes))
    for entry, layout in plan.tensor_layouts.items():
        meant = matched(entry, nodes)
        below = [name for name in matrices if any(not each or f"{name}.".startswith(f"{each}.") for each in meant)]
        if not below:
            raise means_no_matrix(entry, matrices)
        apart = [name for name in below if not plan.is_split(resolved.name_stage[name])]
        if layout != "whole" and len(apart) == len(below):
            raise is_not_split(entry, plan, resolved.name_stage[apart[0]])
    return {name: layout for name in matrices if (layout := asked[name]) is not None}


def with_ancestors(names: Sequence[str]) -> list[str]:
    """Returns all names and their ancestors, each once, parents before children.

    A module that is registered twice has one name among the modules, while its parameters have both: the ancestors of
    the second name are nodes all the same.
    """
    nodes: dict[str, None] = {"": None}
    for name in names:
        above: list[str] = []
        while name not in nodes:
            above.append(name)
            name = _parent(name)
        nodes.update(dict.fromkeys(reversed(above)))
    return list(nodes)


def assign(
    entries: Mapping[str, _Owner], nodes: Sequence[str], not_found: Callable[[str], PlanError]
) -> dict[str, _Owner | None]:
    """Returns the owner (a stage) each node gets from its own entry, else from its parent.

    Args:
        entries: Names and globs to owners.
        nodes: Names with their ancestors, parents before children.
        not_found: The error for an entry that matches nothing.
    """
    known = set(nodes)
    direct: dict[str, _Owner] = {}
    for entry, owner in entries.items():
        if entry in known:
            continue
        names = outermost(entry, nodes)
        if not names:
            raise not_found(entry)
        direct.update(dict.fromkeys(names, owner))
    direct.update((entry, owner) for entry, owner in entries.items() if entry in known)

    assigned: dict[str, _Owner | None] = {}
    for name in nodes:
        inherited = assigned[_parent(name)] if name else None
        assigned[name] = direct.get(name, inherited)
    return assigned


def matched(entry: str, nodes: Sequence[str]) -> list[str]:
    """Returns the nodes that an entry means: the one of that name, else the outermost ones that it matches as a
    glob."""
    return [entry] if entry in nodes else outermost(entry, nodes)


def outermost(pattern: str, nodes: Sequence[str]) -> list[str]:
    """Returns the nodes a glob matches, less those below another one that it matches."""
    if not any(sign in pattern for sign in "*?["):
        return []
    matches = re.compile(translate(pattern)).match  # as fnmatchcase does
    covered: set[str] = set()
    outermost: list[str] = []
    for name in nodes:
        if name and _parent(name) in covered:
            covered.add(name)
        elif matches(name):
            covered.add(name)
            outermost.append(name)
    return outermost


def _own(
    assigned: Mapping[str, int | None], parameters: Sequence[str], aliases: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, int]]:
    """Owner of each parameter that has one, and the stage of each of its names."""
    found = {name: stage for name in (*parameters, *aliases) if (stage := assigned[name]) is not None}
    owner = {name: found[name] for name in parameters if name in found}
    for alias, name in aliases.items():
        if alias in found:
            owner.setdefault(name, found[alias])
    ordered = {name: owner[name] for name in parameters if name in owner}
    name_stage = dict(ordered)
    for alias, name in aliases.items():
        if name in ordered:
            name_stage[alias] = found.get(alias, ordered[name])
    return ordered, name_stage


def _status(
    modules: Sequence[str], name_stage: Mapping[str, int], assigned: Mapping[str, int | None]
) -> dict[str, int | None]:
    """Maps each module to the stage that wholly owns it, to `_MIXED`, or, where it has no parameters and no entry, to
    None."""
    below: dict[str, set[int]] = {name: set() for name in modules}
    has_parameters: set[str] = set()
    for name, stage in name_stage.items():
        below[_parent(name)].add(stage)
        has_parameters.add(_parent(name))
    status: dict[str, int | None] = {}
    for name in reversed(modules):  # children before parents
        stages, own = below[name], assigned[name]
        if name not in has_parameters and own is not None:
            stages.add(own)
        status[name] = None if not stages else stages.copy().pop() if len(stages) == 1 else _MIXED
        if name:
            below[_parent(name)] |= stages
            if name in has_parameters:
                has_parameters.add(_parent(name))
    return status


def _parent(name: str) -> str:
    return name.rpartition(".")[0]

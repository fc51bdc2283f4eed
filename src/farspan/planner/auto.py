"""The plan one gets without asking: stages of equal estimated cost, cut between blocks where that is as good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from farspan.errors import PlanError
from farspan.plan import Plan
from farspan.planner.partition import partition

__all__ = ["Atom", "auto_plan", "placement_of"]

_SLACK = 0.05
"""A cut inside a block makes it a container, recorded op by op: worth it for more than this share of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Atom:
    """A module, or a parameter held directly by a container, that is placed as a whole.

    Attributes:
        name: Its name in the model.
        cost: What running it costs, in any unit that all atoms share.
        num_parameters: Elements of its parameters; a tied parameter counts at its first name only.
        parameter_bytes: Their size.
    """

    name: str
    cost: float
    num_parameters: int = 0
    parameter_bytes: int = 0


def auto_plan(atoms: Sequence[Atom], *, num_stages: int, devices: Sequence[str]) -> Plan:
    """Cut `atoms`, in the order in which they run, into stages of equal cost.

    Args:
        atoms: What there is to place; together they hold every parameter.
        num_stages: How many stages; each gets at least one atom.
        devices: Stage k lies on devices[k % len(devices)].

    Raises:
        PlanError: There are fewer atoms than stages.

    Example:
        >>> atoms = [Atom(name=f"blocks.{i}", cost=1.0) for i in range(4)]
        >>> auto_plan(atoms, num_stages=2, devices=["rank:0", "rank:1"]).placement
        {'blocks.0': 0, 'blocks.1': 0, 'blocks.2': 1, 'blocks.3': 1}
    """
    if num_stages < 1 or not devices:
        raise PlanError(
            f"no plan has {num_stages} stages on {len(devices)} devices.",
            why="there must be at least one stage and one device.",
            hint='auto_plan(atoms, num_stages=1, devices=["rank:0"])',
        )
    if num_stages == 1:  # holds for a model without any parameter too
        stage_of, placement = [0] * len(atoms), {"": 0}
    elif len(atoms) < num_stages:
        raise PlanError(
            f"no plan has {num_stages} stages for this model.",
            why=f"it has {len(atoms)} modules with parameters that can be placed on their own"
            + (f": {', '.join(repr(atom.name) for atom in atoms)}." if atoms else "."),
            hint=f"stages={max(len(atoms), 1)} on as many ranks, or a model of more modules",
        )
    else:
        stage_of = partition([atom.cost for atom in atoms], num_stages, cut_costs=_cut_costs(atoms), slack=_SLACK)
        placement = placement_of(atoms, stage_of)
    return Plan(
        stages=tuple(devices[stage % len(devices)] for stage in range(num_stages)),
        placement=placement,
        estimates=_estimates(atoms, stage_of, num_stages),
    )


def _cut_costs(atoms: Sequence[Atom]) -> list[float]:
    """What a cut before each atom costs: the number of numbered modules (blocks) it goes through.

    >>> _cut_costs([Atom(name=name, cost=0.0) for name in ("embed", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp")])
    [0.0, 0.0, 0.0, 1.0]
    """
    costs = [0.0]
    for above, below in pairwise(atoms):
        shared = 0
        for left, right in zip(above.name.split("."), below.name.split("."), strict=False):
            if left != right:
                break
            shared += left.isdecimal()
        costs.append(float(shared))
    return costs[: len(atoms)]


def placement_of(atoms: Sequence[Atom], stage_of: Sequence[int]) -> dict[str, int]:
    """Atoms to stages; the atoms of a block, or of a part of it, that stayed in one piece become one entry."""
    stages_of: dict[str, set[int]] = {}
    for atom, stage in zip(atoms, stage_of, strict=True):
        for name in _from_block(atom.name):
            stages_of.setdefault(name, set()).add(stage)
    placement: dict[str, int] = {}
    for atom, stage in zip(atoms, stage_of, strict=True):
        placement[next(name for name in _from_block(atom.name) if len(stages_of[name]) == 1)] = stage
    return placement


def _from_block(name: str) -> list[str]:
    """The names from the outermost numbered module that holds `name` down to `name` itself.

    >>> _from_block("decoder.blocks.3.mlp.weight"), _from_block("head")
    (['decoder.blocks.3', 'decoder.blocks.3.mlp', 'decoder.blocks.3.mlp.weight'], ['head'])
    """
    parts = name.split(".")
    first = next((depth for depth, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return [".".join(parts[: depth + 1]) for depth in range(first, len(parts))]


def _estimates(atoms: Sequence[Atom], stage_of: Sequence[int], num_stages: int) -> dict[str, list[float]]:
    costs, counts, sizes = [0.0] * num_stages, [0] * num_stages, [0] * num_stages
    for atom, stage in zip(atoms, stage_of, strict=True):
        costs[stage] += atom.cost
        counts[stage] += atom.num_parameters
        sizes[stage] += atom.parameter_bytes
    total = sum(costs) or 1.0
    return {
        "num_parameters": [*counts],
        "parameter_bytes": [*sizes],
        "share": [round(cost / total, 4) for cost in costs],
    }

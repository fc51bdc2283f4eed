"""A unit of a model that is placed as a whole, and the placement of a plan that units make.

units                                          stage   placement
embed                                          0       "embed": 0
blocks.0.attn, blocks.0.mlp                    0, 0    "blocks.0": 0          what stayed whole is one entry
blocks.1.attn, blocks.1.mlp                    0, 1    "blocks.1.attn": 0, "blocks.1.mlp": 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Unit", "cut_costs", "placement_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module, or a parameter held directly by a container, that is placed as a whole.

    Attributes:
        name: Its name in the model.
        cost: What running it costs, in any unit that all units share.
        num_parameters: Elements of its parameters; a tied parameter counts at its first name only.
        parameter_bytes: Their size.
    """

    name: str
    cost: float
    num_parameters: int = 0
    parameter_bytes: int = 0


def cut_costs(units: Sequence[Unit]) -> list[float]:
    """Returns the cost of a cut before each unit: the number of numbered modules (blocks) it goes through.

    >>> cut_costs([Unit(name=name, cost=0.0) for name in ("embed", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp")])
    [0.0, 0.0, 0.0, 1.0]
    """
    costs = [0.0]
    for above, below in pairwise(units):
        shared = 0
        for left, right in zip(above.name.split("."), below.name.split("."), strict=False):
            if left != right:
                break
            shared += left.isdecimal()
        costs.append(float(shared))
    return costs[: len(units)]


def placement_of(units: Sequence[Unit], stage_of: Sequence[int]) -> dict[str, int]:
    """Returns the stage of each unit, by name; the units of a block, or of a part of it, that stayed whole become one
    entry."""
    stages_of: dict[str, set[int]] = {}
    for unit, stage in zip(units, stage_of, strict=True):
        for name in _from_block(unit.name):
            stages_of.setdefault(name, set()).add(stage)
    placement: dict[str, int] = {}
    for unit, stage in zip(units, stage_of, strict=True):
        placement[next(name for name in _from_block(unit.name) if len(stages_of[name]) == 1)] = stage
    return placement


def _from_block(name: str) -> list[str]:
    """Returns the names from the outermost numbered module that holds `name` down to `name` itself.

    >>> _from_block("decoder.blocks.3.mlp.weight"), _from_block("head")
    (['decoder.blocks.3', 'decoder.blocks.3.mlp', 'decoder.blocks.3.mlp.weight'], ['head'])
    """
    parts = name.split(".")
    first = next((depth for depth, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return [".".join(parts[: depth + 1]) for depth in range(first, len(parts))]

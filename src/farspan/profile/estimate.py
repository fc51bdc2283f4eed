"""Choosing the units in which a model is placed: small enough to balance the stages, large enough to be called whole.

    GPT                      opened: it carries everything
      embedding, position    units
      blocks                 opened: a list of blocks
        0, 1, .. 7           units, unless one alone is more than half a stage: then attention, mlp, ... instead
      norm, head             units

Opening costs nothing by itself: a module all of whose units end up on one stage is called whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from farspan.errors import PlanError
from farspan.plan.hints import names_meant
from farspan.planner import Unit
from farspan.profile.cost import (
    PARAMETER_LISTS,
    children_with_parameters,
    is_indivisible,
    module_cost,
    widest_convolution,
)

__all__ = ["units_of"]

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, *PARAMETER_LISTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A module, or a parameter of an opened one, with its estimated cost."""

    name: str
    what: nn.Module | nn.Parameter
    cost: float
    is_in_list: bool = False

    @property
    def can_open(self) -> bool:
        return isinstance(self.what, nn.Module) and not is_indivisible(self.what)

    @property
    def is_list(self) -> bool:
        return isinstance(self.what, _LISTS) and not self.is_in_list


def units_of(model: nn.Module, num_stages: int, apart: Sequence[str] = ()) -> list[Unit]:
    """Choose what is placed as a whole, in the order of registration, with estimated costs.

    Modules without parameters inside an opened module are no units: they run where their inputs are.

    Args:
        model: Any module; it is not run.
        num_stages: For how many stages the units are meant: more stages, finer units.
        apart: Names or patterns; what they mean is not in one unit with other things, where it can be placed by itself.

    Returns:
        Units that together hold every parameter of `model`; costs as in `farspan.profile.cost`.

    Raises:
        PlanError: The model has parameters whose shapes are not known yet (`nn.LazyLinear` and the like), or a name
            in `apart` matches nothing in it.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> [(unit.name, unit.cost) for unit in units_of(model, 2)]
        [('0', 72.0), ('2', 72.0)]
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise PlanError(
                f"the parameter '{name}' has no shape yet.",
                why="it belongs to a lazy module, which learns its shape in its first forward.",
                hint="run the model once on an example before farspan.distribute(model)",
            )
    widest = widest_convolution(model)
    total = module_cost(model, widest=widest)
    units = [_Unit(name="", what=model, cost=total)] if next(model.parameters(), None) is not None else []
    heavy = total / (2 * num_stages)
    seen: set[int] = set()
    above = _above(names_meant(apart, _names(model)))
    units = [part for unit in units for part in _opened(unit, heavy, widest, seen, above)]
    # Still too few? Open the heaviest, and with it all that cost the same: blocks are alike.
    while sum(unit.cost > 0 for unit in units) < 2 * num_stages and any(unit.can_open for unit in units):
        most = max(unit.cost for unit in units if unit.can_open)
        units = [
            part
            for unit in units
            for part in (_parts(unit, widest, seen) if unit.can_open and unit.cost >= most else [unit])
        ]
    return list(_weigh(units))


def _names(model: nn.Module) -> list[str]:
    """Returns the names of all modules and parameters."""
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return modules + [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _above(names: Collection[str]) -> set[str]:
    """Returns the names above some.

    >>> sorted(_above(["blocks.0.mlp", "head"]))
    ['', 'blocks', 'blocks.0']
    """
    parts = [name.split(".") for name in names if name]
    return {".".join(each[:depth]) for each in parts for depth in range(len(each))}


def _opened(unit: _Unit, heavy: float, widest: int, seen: set[int], above: Collection[str]) -> Iterator[_Unit]:
    """`unit`, or what it opens into: lists, whatever is too heavy, and what is above something."""
    if unit.can_open and (unit.is_list or unit.cost > heavy or unit.name in above):
        for part in _parts(unit, widest, seen):
            yield from _opened(part, heavy, widest, seen, above)
    else:
        yield unit


def _parts(unit: _Unit, widest: int, seen: set[int]) -> Iterator[_Unit]:
    """Yields the parameters a module holds itself, and its children with parameters.

    Those in lists are weights; others are added to something, as a rule: no cost.

    A module or parameter found a second time has an owner already: `seen` holds those found.
    """
    assert isinstance(unit.what, nn.Module)
    is_list = isinstance(unit.what, _LISTS)
    prefix = f"{unit.name}." if unit.name else ""
    for name, parameter in unit.what.named_parameters(recurse=False):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            cost = float(parameter.numel()) if isinstance(unit.what, PARAMETER_LISTS) else 0.0
            yield _Unit(name=prefix + name, what=parameter, cost=cost)
    for name, child in children_with_parameters(unit.what):
        if id(child) not in seen:
            seen.add(id(child))
            yield _Unit(name=prefix + name, what=child, cost=module_cost(child, widest=widest), is_in_list=is_list)


def _weigh(units: list[_Unit]) -> Iterator[Unit]:
    """Units with their sizes, each parameter counted at the first that holds it."""
    seen: set[int] = set()
    for unit in units:
        held = [unit.what] if isinstance(unit.what, nn.Parameter) else list(unit.what.parameters())
        new = [parameter for parameter in held if id(parameter) not in seen]
        seen.update(id(parameter) for parameter in new)
        yield Unit(
            name=unit.name,
            cost=unit.cost,
            num_parameters=sum(parameter.numel() for parameter in new),
            parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in new),
        )

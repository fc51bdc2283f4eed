"""What `tensor_parallel=` of `farspan.distribute` stands for: how many ranks run each layer, and how matrices lie.

2                                     two ranks run each layer; what is split how follows from what the model does
"auto"                                the number whose simulated step is the shortest, of those that fit
{"degree": 2, "lm_head": "vocab"}     and what is asked of single matrices, as a plan keeps it
{"degree": 2, "*": "sequence"}        and sums of matrices are divided along the sequence
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from farspan.errors import PlanError
from farspan.execute.engine import Engine
from farspan.place.mesh.groups import nominal_machine, nominal_micro_batches
from farspan.plan import Plan, check
from farspan.planner.mesh import DegreeForecast, best_degree
from farspan.profile import narrow_sides, units_of
from farspan.units import count_of, format_bytes

__all__ = ["TensorAxis", "check_tensor_parallel", "places_of", "tensor_axis"]

_MATRICES_FOR_EACH_SUM = 3
"""A transformer's block has four in its attention and two or three in its MLP, and adds up after each."""
_CONVOLUTIONS_FOR_EACH_SUM = 2
"""One gives channels to the ranks, and the next one takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAxis:
    """How the ranks of a group run layers together.

    Attributes:
        places: Of an automatic plan's stages; none where no layer is to be split.
        layouts: What is asked of single matrices, for a plan.
        said: One line on what has been chosen; "" where the caller has chosen.
    """

    places: Sequence[str] = ()
    layouts: Mapping[str, str] = field(default_factory=dict[str, str])
    said: str = ""

    def of(self, plan: Plan, num_ranks: int) -> Plan:
        """Returns the plan with what is asked of single matrices.

        Raises:
            PlanError: It has none that several ranks run.
        """
        if not self.layouts:
            return plan
        if num_ranks > 1 and not self.said and not any(map(plan.is_split, range(plan.num_stages))):
            raise PlanError(
                "tensor_parallel={...} with a plan whose layers run on one rank each.",
                why="names of matrices say how they lie on the ranks of a split stage, of which there is none.",
                hint='{"degree": 2, ...} with plan="auto", or "rank:0&rank:1" in the plan',
            )
        return dataclasses.replace(plan, tensor_layouts={**plan.tensor_layouts, **self.layouts})


def check_tensor_parallel(value: Any, plan: Any, **others: Any) -> None:
    """Raise if the argument of `farspan.distribute` is none, or goes with none of the others that are given.

    Raises:
        PlanError: It says which.
    """
    if value is None:
        return
    degree, layouts = _degree_of(value), _layouts_of(value)
    check.tensor_layouts(layouts)
    is_count = isinstance(degree, int) and not isinstance(degree, bool) and degree >= 1
    if not (is_count or degree in (None, "auto")):
        raise PlanError(
            f"tensor_parallel={value!r} is no number of ranks.",
            why="it says how many ranks run each layer together.",
            hint='tensor_parallel=2, "auto", or {"degree": 2, "lm_head": "vocab"}',
        )
    given = [name for name, other in others.items() if other]
    if not (isinstance(plan, str) and plan == "auto") and degree is not None:
        given.append("plan")
    if degree != 1 and given:
        raise PlanError(
            f"tensor_parallel={value!r} with {given[0]}=.",
            why="it is for automatic plans, of which nothing else is asked; in a plan of your own a stage of two ranks"
            '\nthat run each layer together is "rank:0&rank:1".',
            hint=f"leave out {given[0]}=, or tensor_parallel="
            + (', or its "degree"' if isinstance(value, Mapping) else ""),
        )


def tensor_axis(
    engine: Engine, model: nn.Module, value: Any, plan: Any, stages: Any, micro_batches: int | str | None
) -> TensorAxis:
    """Returns what the argument stands for on the ranks of a group; the same on all.

    Args:
        engine: This rank's.
        model: Which is distributed.
        value: As `check_tensor_parallel` has let it pass.
        plan: As the caller of `distribute` has given it.
        stages: The same.
        micro_batches: The same.

    Raises:
        PlanError: The ranks cannot be divided so, or `stages` asks for another number.
    """
    if value is None:
        return TensorAxis()
    degree, layouts, said, num_ranks = _degree_of(value), _layouts_of(value), "", engine.num_ranks
    if not (isinstance(plan, str) and plan == "auto"):
        return TensorAxis(layouts=layouts)
    if degree is None:  # names alone: as many ranks for each layer as there are, or as leave so many stages
        degree = max(num_ranks // stages, 1) if type(stages) is int and stages > 0 else num_ranks
    if degree == "auto" and num_ranks > 1:
        degree, said = _chosen(engine, model, stages, micro_batches)
    degree = 1 if degree == "auto" else degree
    return TensorAxis(places=places_of(num_ranks, degree, stages), layouts=layouts, said=said)


def places_of(num_ranks: int, degree: int, stages: Any) -> list[str]:
    """Returns the places of the stages of so many ranks; none where no layer is to be split.

    Raises:
        PlanError: The ranks cannot be divided so, or `stages` asks for another number.
    """
    if degree == 1:
        return []
    num_stages, rest = divmod(num_ranks, degree)
    if rest or not num_stages:
        raise PlanError(
            f"tensor_parallel={degree} does not divide {num_ranks} rank{'s' * (num_ranks != 1)}.",
            why="each stage has as many ranks, which run each of its layers together.",
            hint=f"farspan run -n {degree * max(num_stages, 1)} train.py",
        )
    if stages not in ("auto", num_stages):
        number = stages * degree if type(stages) is int and stages > 0 else num_ranks
        raise PlanError(
            f"stages={stages!r} with tensor_parallel={degree} on {count_of(num_ranks, 'rank')}.",
            why=f"{count_of(num_ranks, 'rank')} are {count_of(num_stages, 'stage')} of {count_of(degree, 'rank')}.",
            hint=f"leave out stages=, or: farspan run -n {number} train.py",
        )
    return ["&".join(f"rank:{stage * degree + number}" for number in range(degree)) for stage in range(num_stages)]


def _degree_of(value: Any) -> Any:
    return value.get("degree") if isinstance(value, Mapping) else value


def _layouts_of(value: Any) -> dict[str, str]:
    return {name: layout for name, layout in value.items() if name != "degree"} if isinstance(value, Mapping) else {}


def _chosen(engine: Engine, model: nn.Module, stages: Any, micro_batches: int | str | None) -> tuple[int, str]:
    """Returns the best number of ranks for each layer, by what rank 0 knows of the machines, and a line about it."""
    num_ranks = engine.num_ranks
    if type(stages) is int and stages > 0 and num_ranks % stages == 0:
        return (
            num_ranks // stages,
            f"tensor_parallel={num_ranks // stages}: {count_of(num_ranks, 'rank')} for {count_of(stages, 'stage')}",
        )
    agreement, blob = engine.agreement_of_all, b""
    if agreement.side.rank == 0:
        try:
            found = _best(model, num_ranks, micro_batches)
            blob = f"{found.degree} {found.num_stages} {found.held_bytes}".encode()
        except PlanError as error:  # all ranks raise it
            blob = f"{error.what}\0{error.why}\0{error.hint}".encode()
    text = agreement.broadcast('tensor_parallel="auto"', blob, 0).decode()
    if "\0" in text:
        what, why, hint = text.split("\0")
        raise PlanError(what, why=why, hint=hint)
    degree, num_stages, held = text.split()
    said = (
        f"tensor_parallel={degree} ({num_stages} stage{'s' * (num_stages != '1')}) has the shortest simulated step; "
        f"a rank holds at most {format_bytes(float(held))} of parameters, gradients and optimizer state"
    )
    return int(degree), said


def _best(model: nn.Module, num_ranks: int, micro_batches: int | str | None) -> DegreeForecast:
    matrices, kernels = narrow_sides(model)
    narrow = sorted(matrices + kernels)
    middle = narrow[len(narrow) // 2] if narrow else 0
    return best_degree(
        units_of(model, num_ranks),
        num_ranks,
        nominal_machine(num_ranks),
        num_micro_batches=nominal_micro_batches(micro_batches, num_ranks),
        num_sums=len(matrices) // _MATRICES_FOR_EACH_SUM + len(kernels) // _CONVOLUTIONS_FOR_EACH_SUM,
        summed_bytes=float(middle * max((item.element_size() for item in model.parameters()), default=4)),
    )

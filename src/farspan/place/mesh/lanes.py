"""The number of micro-batches that `micro_batches="auto"` stands for: chosen at the first batch that can be cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from farspan.errors import PlanError, quoted
from farspan.execute.engine import Engine
from farspan.plan import Plan
from farspan.planner.mesh import best_lanes, seconds_of_work
from farspan.profile import keeps_statistics
from farspan.record.lanes.batch import BatchedModel, called_parts
from farspan.record.parameters.copying import plan_by_model

__all__ = ["check_micro_batches", "cut_batches"]

_MANY_ROWS = 1 << 20


class _Choice:
    """Chooses once, by the work of the first batch; the same on all ranks and in each run of a program.

    Args:
        engine: This rank's.
        plan: Of the model, as estimated before anything has been measured.
        chosen: Is given the number.
    """

    def __init__(self, engine: Engine, plan: Plan, chosen: Callable[[int], None]) -> None:
        self._engine = engine
        self._plan = plan
        self._chosen = chosen
        self._number = 0
        self._widths = [len(plan.ranks_of(stage)) for stage in range(plan.num_stages)]

    @property
    def num_workers(self) -> int:
        """Returns how many workers share the work of a batch."""
        return sum(self._widths)

    def __call__(self, work: Sequence[tuple[float, float, float]], num_rows: int) -> int:
        """Returns the number for a batch of so many rows, of which each operation takes as much as `work` says."""
        if not self._number:
            engine, plan = self._engine, self._plan
            kind = engine.teams[0].leader.device_type
            found = best_lanes(seconds_of_work(work, kind), _shares_of(plan), num_rows, widths=self._widths)
            self._number = found.number
            self._chosen(found.number)
            if found.number > 1:
                engine.console.say(
                    f"batches are cut into {found.number} micro-batches: the simulated step is {found.gain:.1f} times "
                    f'as fast as with one; micro_batches={found.number} in place of "auto" makes it sure to stay so'
                )
        return self._number


def _shares_of(plan: Plan) -> Sequence[float]:
    """Returns each stage's share in the work of a step, as estimated; equal ones where a plan does not say."""
    shares = plan.estimates.get("share", ())
    return shares if len(shares) == plan.num_stages and sum(shares) > 0 else [1.0] * plan.num_stages


def _worth_asking_for(busy_s: Sequence[float]) -> tuple[int, float]:
    """Returns the best number of micro-batches for a step that was one, and how many times as fast it would be.

    Args:
        busy_s: What each rank has worked in it, one after the other.
    """
    found = best_lanes(lambda number: sum(busy_s) / number, busy_s, _MANY_ROWS)
    return found.number, found.gain


def cut_batches(engine: Engine, model: nn.Module, plan: Plan, micro_batches: Any) -> None:
    """Cut the batches that `model` is called with into as many micro-batches as the plan or the planner says.

    Args:
        engine: This rank's.
        model: The user's model.
        plan: Its plan before anything has been measured: their number must not depend on measured times.
        micro_batches: As the caller has given it.
    """
    if not any(map(keeps_statistics, model.modules())):  # of all rows of a batch
        engine.console.best_lanes = _worth_asking_for
    batches = engine.recorder.batches
    engine.console.may_cut = lambda: batches.may_be_cut
    batches.is_number_chosen |= micro_batches == "auto"
    number: Any = plan.micro_batches
    if micro_batches == "auto" and number == 1:  # else the plan has it from an earlier run

        def note(found: int) -> None:
            plan_by_model[model] = engine.console.plan = dataclasses.replace(plan_by_model[model], micro_batches=found)

        number = _Choice(engine, plan, note)
        if number.num_workers == 1:
            return
    for part in called_parts(model):
        if number == 1:
            batches.unseen.add(id(part))
        else:
            batches.models[id(part)] = BatchedModel(part, number, engine.console.say)


def check_micro_batches(micro_batches: Any) -> None:
    """Raise unless it is None, "auto" or a number of micro-batches."""
    if micro_batches not in (None, "auto") and (type(micro_batches) is not int or micro_batches < 1):
        raise PlanError(
            f"micro_batches={quoted(micro_batches)} is no number of micro-batches.",
            why='it is a whole number from 1, or "auto".',
            hint='farspan.distribute(model, micro_batches=4), or "auto"',
        )

"""The number of micro-batches that `micro_batches="auto"` stands for: chosen at the first batch that can be cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from farspan.execute.engine import Engine
from farspan.plan import Plan
from farspan.planner.mesh import best_lanes, seconds_of_work

__all__ = ["LanesChoice", "lanes_worth_asking_for", "shares_of"]

_MANY_ROWS = 1 << 20


class LanesChoice:
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
        """How many there are to share the work of a batch."""
        return sum(self._widths)

    def __call__(self, work: Sequence[tuple[float, float, float]], num_rows: int) -> int:
        """The number for a batch of so many rows, of which each operation takes as much as `work` says."""
        if not self._number:
            engine, plan = self._engine, self._plan
            kind = engine.teams[0].leader.device_type
            found = best_lanes(seconds_of_work(work, kind), shares_of(plan), num_rows, widths=self._widths)
            self._number = found.number
            self._chosen(found.number)
            if found.number > 1:
                engine.console.say(
                    f"batches are cut into {found.number} micro-batches: the simulated step is {found.gain:.1f} times "
                    f'as fast as with one; micro_batches={found.number} in place of "auto" makes it sure to stay so'
                )
        return self._number


def shares_of(plan: Plan) -> Sequence[float]:
    """Of each stage in the work of a step, as estimated; equal ones where a plan does not say."""
    shares = plan.estimates.get("share", ())
    return shares if len(shares) == plan.num_stages and sum(shares) > 0 else [1.0] * plan.num_stages


def lanes_worth_asking_for(busy_s: Sequence[float]) -> tuple[int, float]:
    """The best number of micro-batches for a step that was one, and how many times as fast it would be.

    Args:
        busy_s: What each rank has worked in it, one after the other.
    """
    found = best_lanes(lambda number: sum(busy_s) / number, busy_s, _MANY_ROWS)
    return found.number, found.gain

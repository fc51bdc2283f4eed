"""Repartitions a model, while a program trains, when ranks have become slower or faster than the others for long.

    every step       all ranks: what tasks took, compared with what they usually take (`execute.step.pace`), with the
                     results of the step that are exchanged anyway
    30 s later       all ranks find the same change (`slowdown`)
    optimizer.step() rank 0 searches with the new speeds; if another plan wins more than predictions are off, the model
                     is repartitioned, else the speeds are the usual ones from now on

A plan of the user's own is never changed: one line says what was found. Numbers do not depend on any of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from farspan import settings
from farspan.errors import PlanError
from farspan.execute.engine import Engine
from farspan.execute.exchange import PaceNote
from farspan.place.places import replace_plan
from farspan.place.repartition.search import Choice, PlanSearch, stage_of
from farspan.place.repartition.slowdown import Change, Slowdowns
from farspan.plan import Plan
from farspan.record.parameters.copying import plan_by_model
from farspan.units import count_of, format_bytes, format_seconds

__all__ = ["Watch", "parts_of", "watch_of"]

_HOLD_S = 30.0
"""For how many seconds of training steps a change must last, unless FARSPAN_STRAGGLER says otherwise."""
_NUM_LOOKS = 40
"""Of the time that a change must last at first: so often what steps take is looked at."""
_MOST_TRIES = 3
"""Steps after which something may still use a parameter that is to move."""
_QUIET = 10
"""After so many times the time that a change must last without any, it is again as at first."""
_LONGEST = 64
"""It doubles with each change up to so many times what it was at first: speeds that go up and down move nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """The same on every rank."""

    plan: Plan
    is_new: bool
    said: str
    changes: tuple[float, ...] = ()


class Watch:
    """Watches over the plan of one model, on one rank.

    Args:
        engine: This rank's.
        model: The user's model.
        hold_s: For how long a change must last; equal on all ranks.
        may_replan: Whether the plan may be changed then; equal on all ranks.
    """

    def __init__(self, engine: Engine, model: nn.Module, hold_s: float, *, may_replan: bool) -> None:
        self.engine = engine
        self.num_ranks = engine.num_ranks
        self.model = model
        self.may_replan = may_replan
        self._first_hold_s = self._hold_s = hold_s
        self._is_searchable = False
        self._search: PlanSearch | None = None
        self._parts: list[tuple[str, int]] = []
        self._plan: Plan
        self._slowdowns: Slowdowns
        self._change: Change | None = None
        self._decision: _Decision | None = None
        self._num_tries = 0

    def settle(self, plan: Plan, said: str, *, is_searchable: bool = False, search: PlanSearch | None = None) -> None:
        """The first step was measured, and the plan of the model is settled.

        Args:
            plan: It.
            said: What there is to say of it.
            is_searchable: As for `begin`.
            search: As for `begin`.
        """
        self.engine.console.say(said)
        self._show(plan)
        self.begin(plan, is_searchable=is_searchable, search=search)

    def _show(self, plan: Plan) -> None:
        shown = plan_by_model[self.model]
        plan = plan_by_model[self.model] = dataclasses.replace(plan, micro_batches=shown.micro_batches)
        self.engine.console.show_plan(plan, instead_of=shown)

    def begin(self, plan: Plan, *, is_searchable: bool = False, search: PlanSearch | None = None) -> None:
        """The plan of the model is settled.

        Args:
            plan: It.
            is_searchable: Whether the costs of a step are known, so that another one can be searched.
            search: With these; on rank 0.
        """
        is_split = any(map(plan.is_split, range(plan.num_stages)))  # whose members wait for each other in each layer
        if self.engine.num_ranks == 1 or is_split or self.engine.groups.shards is not None:
            return
        self._plan, self._is_searchable, self._search = plan, is_searchable, search
        self._parts = parts_of(self.model)
        self._watch(())

    def _watch(self, expected_s: Sequence[float]) -> None:
        self._forget_change()
        self._slowdowns = Slowdowns(self.engine.num_ranks, self._hold_s, expected_s)
        self.engine.pace.begin(self._note, every_s=self._first_hold_s / _NUM_LOOKS)

    def _forget_change(self) -> None:
        self._change, self._decision, self._num_tries = None, None, 0
        if self._step_over in self.engine.after_step:
            self.engine.after_step.remove(self._step_over)

    def _is_alone(self) -> bool:
        """Returns whether there is no other model, and the ranks are those of the start."""
        engine = self.engine
        return list(engine.recorder.roots) == [id(self.model)] and engine.num_ranks == self.num_ranks

    def _note(self, steps: Sequence[Sequence[PaceNote]]) -> None:
        """Steps have run."""
        if not self._is_alone():
            self.engine.pace.begin(None)
            return
        for notes in steps if self._change is None else ():
            self._change = self._slowdowns.add(notes)
            if self._change is not None:
                self.engine.after_step.append(self._step_over)
                return
            if self._hold_s > self._first_hold_s and self._slowdowns.elapsed_s > _QUIET * self._hold_s:
                self._hold_s = self._first_hold_s
                self._slowdowns.hold_s = self._hold_s

    def _step_over(self) -> None:
        """An optimizer has stepped, on every rank."""
        change, engine = self._change, self.engine
        if not self._is_alone():
            self._forget_change()
            engine.pace.begin(None)
            return
        if change is None or engine.recorder.has_pending():
            return
        if self._decision is None:
            why = self._why_not()
            if why:
                self._accept(change, f"the plan stays as it is: {why}", None)
                return
            with engine.executing():
                self._decision = self._decide(change)
        decision = self._decision
        if not decision.is_new:
            self._accept(change, decision.said, decision)
            return
        users: list[str] = []
        moved_bytes = replace_plan(engine, self.model, decision.plan, users)
        self._num_tries += 1
        if moved_bytes is not None:
            moved = f"{decision.said}; {format_bytes(moved_bytes)} of parameters moved"
            self._plan = decision.plan
            self._accept(change, moved, decision)
            self._show(decision.plan)
        elif self._num_tries == _MOST_TRIES:
            self._say(change, f"the plan stays as it is, for now: {users[0]}")
            self._forget_change()
            self._slowdowns.begin_again(self._hold_s)

    def _why_not(self) -> str:
        """Returns why no other plan is searched; "" if one is."""
        if not self._is_searchable:
            return "it is not an automatic one whose first step was measured"
        if not self.may_replan:
            return "replan=False"
        if parts_of(self.model) != self._parts:
            return "the program has changed its modules or parameters"
        return ""

    def _say(self, change: Change, said: str) -> None:
        """Say what was found and done; the next change has to last longer."""
        text = f"{_words_of(change)}: {said}"
        self.engine.console.note(text)
        self.engine.console.warn(f"farspan: {text}")
        self._hold_s = min(2 * self._hold_s, _LONGEST * self._first_hold_s)

    def _accept(self, change: Change, said: str, decision: _Decision | None) -> None:
        """What tasks take now is the usual from here on.

        Args:
            change: What was found.
            said: What was done.
            decision: The plan that is in force now, and what it was made with; None where none was searched.
        """
        self._say(change, said)
        if self._search is not None:
            self._search = self._search.slowed(change.ratios)
        expected_s: Sequence[float] = change.step_s
        if (
            decision is not None and decision.is_new
        ):  # from what was measured, so with each rank's own error of the plan
            pairs = zip(change.step_s, decision.changes, strict=True) if decision.changes else ()
            expected_s = [step_s * times for step_s, times in pairs]
        self._watch(expected_s)

    def _decide(self, change: Change) -> _Decision:
        """Returns what to do, as rank 0 has found it; the same on every rank."""
        engine = self.engine
        result: dict[str, object] = {}
        if self._search is not None:
            try:
                with engine.console.said_if_slow("searching for a plan"):
                    choice = self._search.slowed(change.ratios).choose(self._plan)
            except PlanError as error:
                result = {"error": f"{error.what} {error.why}"}
            else:
                result = {
                    "plan": choice.plan.to_json(),
                    "is_new": choice.is_new,
                    "said": self._said_of(choice, self._search.units),
                    "changes": choice.changes,
                }
        found = json.loads(engine.agreement.broadcast("another plan", json.dumps(result).encode(), 0))
        if "error" in found:
            said = f"the plan stays as it is: {found['error']}"
            return _Decision(plan=self._plan, is_new=False, said=said)
        return _Decision(
            plan=Plan.from_json(found["plan"]),
            is_new=found["is_new"],
            said=found["said"],
            changes=tuple(found["changes"]),
        )

    def _said_of(self, choice: Choice, names: Sequence[str]) -> str:
        """Returns what there is to say of a choice, with how many units each rank has of which that changes."""
        now, best = format_seconds(choice.now.step_s), format_seconds(choice.best.step_s)
        if not choice.is_new:
            return f"the plan stays as it is: a step is likely to take {now}, {best} under the best plan"
        before, after = _num_units(names, self._plan), _num_units(names, choice.plan)
        changed = [rank for rank in range(self.engine.num_ranks) if before[rank] != after[rank]]
        moved = ", ".join(f"rank {rank} {before[rank]} -> {count_of(after[rank], 'unit')}" for rank in changed)
        return f"repartitioned{moved and ', '}{moved}: a step is likely to take {best}, {now} as it was"


def watch_of(engine: Engine, model: nn.Module, replan: bool | None, *, is_measured: bool) -> Watch:
    """Returns the watch over the plan of a model; all ranks call it.

    Args:
        engine: This rank's.
        model: The user's model.
        replan: The argument of `farspan.distribute`.
        is_measured: Whether the plan is automatic, and its first step is measured.

    Raises:
        PlanError: Another plan cannot be searched, and was asked for.
    """
    if replan and not is_measured:
        raise PlanError(
            "replan=True is for automatic plans whose first step is measured.",
            why="plan=, remat=, stages= or tensor_parallel= has chosen already, there are groups (data_parallel=),\n"
            "or measure=False or FARSPAN_MEASURE=0 says that nothing is measured.",
            hint="leave out the one or the other",
        )
    hold_s = settings.seconds("STRAGGLER", default=_HOLD_S)
    hold_s = float(engine.agreement.broadcast("seconds of a straggler", repr(hold_s).encode(), 0))
    return Watch(engine, model, hold_s, may_replan=replan is not False)


def parts_of(model: nn.Module) -> list[tuple[str, int]]:
    """Returns what the plan knows of a model: its modules and parameters, and where they are in it."""
    modules = [(name, id(part)) for name, part in model.named_modules(remove_duplicate=False)]
    return modules + [(name, id(item)) for name, item in model.named_parameters(remove_duplicate=False)]


def _num_units(names: Sequence[str], plan: Plan) -> Counter[int]:
    return Counter(rank for name in names for rank in plan.ranks_of(stage_of(name, plan)))


def _words_of(change: Change) -> str:
    others = sorted(ratio for rank, ratio in enumerate(change.ratios) if rank != change.rank)
    least, most = f"{others[0]:.2g}", f"{others[-1]:.2g}"
    return (
        f"rank {change.rank} takes {change.factor:.2g} times as long as usual for the same work, "
        f"the others {least if least == most else f'{least} to {most}'}, for {change.duration_s:.3g} s"
    )

"""The automatic plan, in two parts: begun with an estimate, then found from what the model's first step takes.

    distribute              estimate, or what was found before: each unit on the rank that it is likely to belong to
    first step              every rank measures the units that it runs; one micro-batch is profiled closely
    after optimizer.step()  all gather what they measured; rank 0 searches the best plan; new owners fetch

The plan changes once, between two steps, and only if that is likely to be worth it. Numbers do not depend on it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from farspan import settings
from farspan.errors import PlanError
from farspan.execute.engine import Engine
from farspan.execute.teams import device_of
from farspan.place.kept_plan import KeptPlan, Widths
from farspan.place.measure.assemble import assemble
from farspan.place.measure.measurements import Measured
from farspan.place.measure.profiling_executor import ProfilingExecutor
from farspan.place.places import place_first, replace_plan
from farspan.place.repartition.device_speeds import speeds_of_ranks
from farspan.place.repartition.gathered_profile import RankMeasured, exchanged
from farspan.place.repartition.link_speeds import links_of_hosts
from farspan.place.repartition.search import Asked, PlanSearch, stage_of
from farspan.place.repartition.stragglers import Watch, parts_of
from farspan.place.undivided import has_undivided
from farspan.plan import Plan
from farspan.plan.hints import Hints
from farspan.profile import HostLink, RankDevice, StepProfile, units_of
from farspan.units import count_of, format_bytes, format_seconds

__all__ = ["begin_measured", "is_measuring", "measure_first"]

_log = logging.getLogger(__name__)
_LEAST_MEASURED = 4
"""Micro-batches, the first of which is not timed."""
_SCHEDULE = "1f1b"
"""The schedule while profiling runs: the profiler itself splits some backwards."""
_MOST_TRIES = 3
"""Steps after which something may still use a parameter that is to move."""


def is_measuring(measure: bool | None) -> bool:
    """Returns whether a first step is to be measured: as `distribute` was asked, else unless FARSPAN_MEASURE says
    no."""
    return settings.flag("MEASURE", default=True) if measure is None else measure


def begin_measured(
    engine: Engine,
    model: nn.Module,
    estimated: Plan,
    hints: Hints,
    schedule: str | None,
    widths: Widths | None,
    watch: Watch,
) -> Plan:
    """Place `model` where it was when its first step was measured before, or as estimated; and measure it (again).

    A plan with wide stages that was found before is not measured again: members of a stage have other times than units.

    Args:
        engine: This rank's.
        model: The user's model.
        estimated: Its plan.
        hints: What is asked of it.
        schedule: That it is to have; None for any.
        widths: What is asked of its wide stages; None where it has none.
        watch: Watches over the plan that is found.

    Returns:
        The plan that it begins with.
    """
    units = [unit.name for unit in units_of(model, engine.num_ranks, hints.patterns)]
    kept = KeptPlan(engine, model, units, hints, schedule, widths)
    ways: dict[str, Any] = {"micro_batches": estimated.micro_batches}
    begun = kept.load() or estimated
    if widths is None or widths.reduction is not None:
        ways["gradient_reduction"] = estimated.gradient_reduction
    begun = dataclasses.replace(begun, **ways)
    if schedule is not None:
        begun = dataclasses.replace(begun, schedule=schedule)
    is_narrow = all(len(begun.ranks_of(stage)) == 1 for stage in range(begun.num_stages))
    may_measure = is_narrow and not begun.remat
    if not (may_measure and measure_first(engine, model, begun, kept=kept, watch=watch)):
        place_first(engine, model, begun)
        watch.begin(begun)
    return begun


def measure_first(engine: Engine, model: nn.Module, begun: Plan, *, kept: KeptPlan, watch: Watch) -> bool:
    """Place `model` so that its first step can be measured, and repartition it after that; all ranks call it.

    Args:
        engine: This rank's.
        model: The user's model.
        begun: Where its units are to be at first.
        kept: Knows what is asked of the plan that is found, and keeps it.
        watch: Watches over that plan.

    Returns:
        Whether it will be measured; if not, it has not been placed.
    """
    if engine.num_ranks == 1 or engine.teams or len(kept.units) <= engine.num_ranks:
        return False
    engine.agreement.agree_on("plan", f"{begun.to_json()}\n{kept.hints}")
    first = _FirstSteps(engine, model, begun, kept, watch)
    stages = tuple(begun.stages[stage] for stage in first.owner)
    placement = {name: number for number, name in enumerate(kept.units)}
    units_apart = dataclasses.replace(begun, stages=stages, placement=placement, schedule=_SCHEDULE, estimates={})
    place_first(engine, model, units_apart)
    engine.after_step.append(first.step_over)
    return True


class _FirstSteps:
    """The part of one rank in measuring, and what comes after it."""

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        begun: Plan,
        kept: KeptPlan,
        watch: Watch,
    ) -> None:
        self.engine = engine
        self.model = model
        self.begun = begun
        self.kept = kept
        self.owner = [stage_of(name, begun) for name in kept.units]
        """Stage of each unit in the plan it began with."""
        self.watch = watch
        self.search: PlanSearch | None = None
        """The search for another plan, with the costs that were measured; None on ranks other than 0."""
        self.profiler = ProfilingExecutor(engine, mode=None, ended=lambda: None, about_to_time=lambda signature: None)
        engine.executor = self.profiler
        engine.after_abort.append(self.interrupted)
        self.parts = parts_of(model)
        self.num_micro_batches = 0
        self.num_tries = 0
        self.found: tuple[Plan, str] | None = None

    def step_over(self) -> None:
        """An optimizer has stepped, on every rank."""
        self.num_micro_batches = self.num_micro_batches or self.profiler.num_micro_batches
        if self.profiler.num_micro_batches < _LEAST_MEASURED or self.engine.recorder.has_pending():
            return
        engine = self.engine
        beside = _beside(engine, self.model, len(self.kept.units))
        if beside:
            self._end(f"the model stays where it began: {beside}")
            return
        if parts_of(self.model) != self.parts:
            self._end("the model stays where it began: the program has changed its modules or parameters")
            return
        if self.found is None:
            with engine.executing(), engine.console.said_if_slow("searching for a plan"):
                self.found = self._find()
        plan, said = self.found
        users: list[str] = []
        moved_bytes = replace_plan(engine, self.model, plan, users)
        self.num_tries += 1
        if moved_bytes is not None:
            engine.after_step.remove(self.step_over)
            engine.after_abort.remove(self.interrupted)
            self.kept.save(plan)
            if moved_bytes:
                said += f"; {format_bytes(moved_bytes)} of parameters moved"
            self.watch.settle(plan, said, is_searchable=True, search=self.search)
        elif self.num_tries == _MOST_TRIES:
            self._end(f"the model stays where it began: {users[0]}")

    def interrupted(self) -> None:
        """A step has ended with an exception: what was measured is not of whole steps. That is said after the next
        step, if the program catches it and goes on."""
        self._stop()
        self.engine.after_step.append(self._stepped_again)

    def _stepped_again(self) -> None:
        self.engine.after_step.remove(self._stepped_again)
        self.watch.settle(self.begun, "the model stays where it began: a step has ended with an exception")

    def _end(self, why: str) -> None:
        """Leave things as they are."""
        self._stop()
        self.watch.settle(self.begun, why)

    def _stop(self) -> None:
        """Measure no more."""
        engine = self.engine
        engine.after_abort.remove(self.interrupted)
        engine.after_step.remove(self.step_over)
        engine.executor = engine.plain_executor()
        engine.executor.remat = self.profiler.remat

    def _find(self) -> tuple[Plan, str]:
        """Returns the plan for what all ranks have measured, and what there is to say of it; the same on every rank."""
        engine = self.engine
        own = next(stage for stage, team in enumerate(engine.teams) if engine.rank in team)
        device = device_of(engine.teams[own].leader)
        hosts, shares = exchanged(engine, self.profiler.measured(), device)
        links = links_of_hosts(engine, hosts)
        result: dict[str, Any] = {}
        if engine.rank == 0:
            try:
                plan, said = self._plan_from(shares, links)
                result = {"plan": plan.to_json(), "said": said}
            except PlanError as error:
                why = " ".join(error.why.split("\n"))
                result = {"error": f"{error.what.rstrip('.')}: {why}"}
        result = json.loads(engine.agreement.broadcast("the plan", json.dumps(result).encode(), 0))
        if "error" in result:  # and yet it has run
            said = f"the plan stays as it was: {result['error']}"
            if not engine.console.is_launched:  # else the console says it where the search has ended
                engine.console.warn(said)
            return self.begun, said
        return Plan.from_json(result["plan"]), result["said"]

    def _plan_from(self, shares: Sequence[RankMeasured], links: Mapping[str, HostLink]) -> tuple[Plan, str]:
        speeds = speeds_of_ranks(shares)
        num_on = Counter(share.host for share in shares)
        profile = self._profile(shares, speeds)
        widths = self.kept.widths
        self.search = PlanSearch(
            profile=profile,
            devices=[
                RankDevice(
                    host=share.host,
                    kind=share.device,
                    memory_bytes=share.memory_bytes // (num_on[share.host] if share.device == "cpu" else 1),
                    speed=speed,
                )
                for share, speed in zip(shares, speeds, strict=True)
            ],
            links=links,
            units=self.kept.units,
            num_micro_batches=self.num_micro_batches,
            asked=Asked(
                hints=self.kept.hints,
                schedule=self.kept.schedule,
                may_be_wide=widths is not None and not has_undivided(self.model),
                reduction="exact" if widths is None else widths.reduction,
            ),
        )
        choice = self.search.choose(self.begun)
        now_s, best_s = choice.now.step_s, choice.best.step_s
        now, best = format_seconds(now_s), format_seconds(best_s)
        units, kinds = count_of(len(self.kept.units), "unit"), count_of(profile.num_unique, "kind")
        _log.info("measured %s of %s: %s a step as it is, %s under the best plan", units, kinds, now, best)
        return choice.plan, said_of_first_step(now_s, best_s, choice.error, is_new=choice.is_new)

    def _profile(self, shares: Sequence[RankMeasured], speeds: Sequence[float]) -> StepProfile:
        """Returns all ranks' shares as one profile, in seconds of a device of speed 1."""
        first = shares[0].measured
        merged = Measured(
            notes={key: note for share in shares for key, note in share.measured.notes.items()},
            samples=[
                dataclasses.replace(sample, seconds=sample.seconds * speed)
                for share, speed in zip(shares, speeds, strict=True)
                for sample in share.measured.samples
            ],
            num_micro_batches=first.num_micro_batches,
            split_micro_batch=first.split_micro_batch,
            gradient_bytes=_largest([share.measured.gradient_bytes for share in shares]),
        )
        parameters = self.engine.parameters
        states = {id(parameters[name].tensor): size for share in shares for name, size in share.state_bytes.items()}
        return assemble(
            merged,
            self.kept.units,
            parameters=parameters,
            states=states,
            device=shares[0].device,
            num_micro_batches=self.num_micro_batches,
            notes=(),
        )


def _beside(engine: Engine, model: nn.Module, num_units: int) -> str:
    """Returns what the program has beside its model, whose places are not found with the model's; "" for nothing."""
    recorder = engine.recorder
    others = recorder.roots.keys() - {id(model)}
    modules = [entry[0] for entry in recorder.keep_alive if id(entry[0]) in others]
    placed = [recorder.placed.get(id(item)) for each in modules for item in each.parameters()]
    if any(item is not None and item.is_copy for item in placed):
        return (
            "the program has a copy of it (copy.deepcopy makes one, and torch's AveragedModel does so for an average)"
        )
    if others:
        return "the program distributes another model, too"
    if len(engine.teams) > num_units:
        return 'the program has put tensors on places of its own (tensor.to("rank:R/device"))'
    return ""


def said_of_first_step(now_s: float, best_s: float, error: float, *, is_new: bool) -> str:
    """Returns what a user should know of the plan after the first step, of whose seconds such predictions are off by a
    share `error`.

    What ranks do between tasks, and their waits for a core, are in no prediction: at the end of a run they are.

    >>> said_of_first_step(0.944, 0.778, 0.15, is_new=True).partition(": ")[2]
    'under a better plan a step is likely to take 778 ms of computing and transfers, not 944 ms'
    >>> said_of_first_step(0.944, 0.944, 0.15, is_new=False)
    'the first step was measured: parameters stay where they are'
    """
    now, best = format_seconds(now_s), format_seconds(best_s)
    measured = "the first step was measured"
    if is_new:
        return f"{measured}: under a better plan a step is likely to take {best} of computing and transfers, not {now}"
    if best_s >= now_s or best == now:
        return f"{measured}: parameters stay where they are"
    return (
        f"{measured}: parameters stay where they are, for the best plan is likely to win less than the "
        f"{100 * error:.0f} % by which predictions can be wrong (computing and transfers of a step: {now} as it is, "
        f"{best} under that plan)"
    )


def _largest(tables: Sequence[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for table in tables:
        for name, size in table.items():
            found[name] = max(size, found.get(name, 0))
    return found

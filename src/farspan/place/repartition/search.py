"""Searches the best plan for ranks of known speeds, from the measured costs of a step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farspan.cluster import Cluster
from farspan.plan import PLANNED_SECONDS, Plan, format_places, parse_places
from farspan.plan.hints import Hints
from farspan.planner.optimize import Prediction, best_plan, predict_step
from farspan.planner.pipeline import Pipeline, PipelineStage
from farspan.profile import HostLink, RankDevice, StepProfile, cluster_of_ranks, costed_graph

__all__ = ["Asked", "Choice", "PlanSearch", "stage_of"]

_LEAST_GAIN = 0.05
"""The least gain, as a share of a step, for which the model is repartitioned: predictions are off by as much."""
_ALIKE = 1.2
"""Ratio up to which devices count as equally fast: what else runs on a machine makes as much of a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the program asks of its plan.

    Attributes:
        hints: About places.
        schedule: That it is to have; None for any.
        may_be_wide: Whether it may have wide stages.
        reduction: How gradients of these are added up; None: exactly, where that hides behind compute.
    """

    hints: Hints
    schedule: str | None
    may_be_wide: bool
    reduction: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan that was chosen of two.

    Attributes:
        plan: It.
        is_new: Whether it is not the one that there was.
        now: What was predicted of the one that there was.
        best: The same of the best one.
        error: Of predictions, as a share of a step: the other plan must win more.
        changes: By rank, how many times as long it computes for a micro-batch as under the one that there was; () where
            one of the two has wide stages, whose members take turns.
    """

    plan: Plan
    is_new: bool
    now: Prediction
    best: Prediction
    error: float
    changes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """The measured costs of a step, and the ranks to run it on.

    Attributes:
        profile: In seconds of a device of speed 1.
        devices: Of each rank.
        links: By host.
        units: Names of what is placed as a whole, in the model's order.
        num_micro_batches: Of a step.
        asked: Of a plan.
    """

    profile: StepProfile
    devices: Sequence[RankDevice]
    links: Mapping[str, HostLink]
    units: Sequence[str]
    num_micro_batches: int
    asked: Asked

    def slowed(self, ratios: Sequence[float]) -> PlanSearch:
        """Returns the same for ranks that take so many times as long as before, by rank."""
        devices = [
            dataclasses.replace(device, speed=device.speed / ratio)
            for device, ratio in zip(self.devices, ratios, strict=True)
        ]
        return dataclasses.replace(self, devices=devices)

    def choose(self, current: Plan) -> Choice:
        """Returns the best plan if it is likely to win more than predictions are off, or `current` does not fit.

        Raises:
            PlanError: Nothing fits, or hints contradict each other.
        """
        cluster, ranks = cluster_of_ranks(_in_steps(self.devices), self.links)
        graph = costed_graph(self.profile, cluster)
        hints = dataclasses.replace(
            self.asked.hints, stages=len(ranks), are_stages_given=self.asked.hints.stages is not None
        ).renumbered(ranks)
        best = best_plan(
            graph,
            cluster,
            self.num_micro_batches,
            hints=hints,
            may_be_wide=self.asked.may_be_wide,
            reduction=self.asked.reduction,
        ).best
        now = self._predicted(current)
        error = max(self.profile.spread, _LEAST_GAIN)
        is_new = best.step_s < (1 - error) * now.step_s or not self._fits(now, current)
        if is_new:
            plan = dataclasses.replace(best.plan, stages=_renamed(best.plan.stages, ranks))
        else:
            plan = dataclasses.replace(current, estimates={**current.estimates, **now.plan.estimates})
        if self.asked.schedule is not None:
            plan = dataclasses.replace(plan, schedule=self.asked.schedule)
        if self.asked.reduction is not None:
            plan = dataclasses.replace(plan, gradient_reduction=current.gradient_reduction)
        return Choice(
            plan=plan,
            is_new=is_new,
            now=now,
            best=best,
            error=error,
            changes=_changes(
                _planned(current, now.plan.estimates, len(self.devices)),
                _planned(plan, plan.estimates, len(self.devices)),
            ),
        )

    def _predicted(self, current: Plan) -> Prediction:
        """Returns what a step under `current` is like. Members of a wide stage count as fast as the slowest of them:
        they take turns."""
        devices = list(self.devices)
        for stage in range(current.num_stages):
            members = current.ranks_of(stage)
            slowest = min(devices[rank].speed for rank in members)
            for rank in members:
                devices[rank] = dataclasses.replace(devices[rank], speed=slowest)
        cluster, ranks = cluster_of_ranks(_in_steps(devices), self.links)
        stages = tuple(
            PipelineStage(device_class=_class_of(cluster, ranks, members), replicas=len(members), nodes=tuple(nodes))
            for members, nodes in self._stages_of(current)
        )
        graph = costed_graph(self.profile, cluster)
        return predict_step(
            graph, cluster, Pipeline(stages=stages), self.num_micro_batches, reduction=current.gradient_reduction
        )

    def _stages_of(self, current: Plan) -> list[tuple[Sequence[int], list[str]]]:
        owner = [stage_of(name, current) for name in self.units]
        return [
            (current.ranks_of(stage), [name for name, its in zip(self.units, owner, strict=True) if its == stage])
            for stage in range(current.num_stages)
        ]

    def _fits(self, now: Prediction, current: Plan) -> bool:
        """Returns whether the current plan has the memory that it needs, and is allowed."""
        limits = [
            [self.asked.hints.memory_of(rank) for rank in current.ranks_of(stage)]
            for stage in range(current.num_stages)
        ]
        return now.fits and all(
            limit is None or each.memory_bytes <= limit
            for each, of_members in zip(now.stages, limits, strict=True)
            for limit in of_members
        )


def stage_of(name: str, plan: Plan) -> int:
    """Returns the stage of a unit in an automatic plan: by its own entry, or by the nearest one above."""
    while name not in plan.placement:
        name = name.rpartition(".")[0]
    return plan.placement[name]


def _planned(plan: Plan, estimates: Mapping[str, Sequence[float]], num_ranks: int) -> list[float]:
    """Returns by rank the seconds of a micro-batch that a plan was made with; [] if it has wide stages."""
    found = [0.0] * num_ranks
    for stage, seconds in enumerate(estimates.get(PLANNED_SECONDS, ())):
        if len(plan.ranks_of(stage)) > 1:
            return []
        found[plan.rank_of(stage)] += seconds
    return found


def _changes(before: Sequence[float], after: Sequence[float]) -> tuple[float, ...]:
    if not (before and after):
        return ()
    return tuple(one and other / one for one, other in zip(before, after, strict=True))


def _in_steps(devices: Sequence[RankDevice]) -> list[RankDevice]:
    """Returns the devices with speeds in steps, so that those that differ by noise alone are of one class."""
    return [
        dataclasses.replace(device, speed=_ALIKE ** round(math.log(device.speed) / math.log(_ALIKE)))
        for device in devices
    ]


def _class_of(cluster: Cluster, ranks: Sequence[int], members: Sequence[int]) -> str:
    names = [each.name for each in cluster.classes for _ in range(each.num_devices)]
    return names[ranks.index(members[0])]


def _renamed(stages: Sequence[str], ranks: Sequence[int]) -> tuple[str, ...]:
    """Returns the stages of a plan for the devices of a cluster as the ranks know them."""
    return tuple(
        format_places(tuple([dataclasses.replace(place, rank=ranks[place.rank]) for place in parse_places(text)]))
        for text in stages
    )

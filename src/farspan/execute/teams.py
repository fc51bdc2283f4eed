"""The teams of stages, and which stages a place named by the program means."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from farspan.devices import CPU
from farspan.errors import PlanError
from farspan.graph import Graph
from farspan.plan import Place, RankDevices, Team, Worker, format_place, format_places, parse_place
from farspan.program.options import Settings

__all__ = [
    "check_devices",
    "check_rank",
    "device_at",
    "device_of",
    "home_stages",
    "own_device",
    "on_device",
    "settings_of",
    "settle_values",
    "stage_number",
    "stage_of_inputs",
    "stages_at",
    "team_at",
    "worker_at",
]


def team_at(places: Sequence[Place], devices: Sequence[RankDevices]) -> Team:
    """Returns the team of a stage.

    Args:
        places: Of its members.
        devices: As each rank has told them.

    Raises:
        PlanError: torch knows no such device, or two of the places are the same device.
    """
    members = tuple([worker_at(place, devices) for place in places])
    if len(set(members)) < len(members):
        raise PlanError(
            f"'{format_places(tuple(places))}' names a device twice.",
            why="a rank alone stands for its GPU, if it has one, else for its CPU.",
            hint=f'"{format_place(places[0])}"',
        )
    return Team(members)


def worker_at(place: Place, devices: Sequence[RankDevices]) -> Worker:
    """Returns the worker that a place stands for; a rank alone stands for its GPU, if it has one.

    Args:
        place: Which.
        devices: As each rank has told them.

    Raises:
        PlanError: torch knows no such device.
    """
    if place.device is None:
        return Worker(place.rank, own_device(place.rank, devices))
    try:
        return Worker(place.rank, str(torch.device(place.device)))
    except RuntimeError as error:
        raise PlanError(
            f"'{format_place(place)}' names a device that torch does not know.",
            why=str(error).splitlines()[0],
            hint=f'"rank:{place.rank}"  or  "rank:{place.rank}/cuda:0"',
        ) from error


def own_device(rank: int, devices: Sequence[RankDevices]) -> str:
    """Returns where a rank computes unless it is told otherwise: the CPU of one that has told nothing."""
    return devices[rank].own if rank < len(devices) else str(CPU)


def check_devices(teams: Sequence[Team], rank: int) -> None:
    """Raise if a stage of this rank is on a device that this process has not.

    Raises:
        PlanError: It names the stage and the device.
    """
    for stage, team in enumerate(teams):
        for worker in team.members:
            if worker.rank != rank:
                continue
            try:
                torch.empty(0, device=worker.device)
            except (RuntimeError, AssertionError) as error:  # what torch raises without CUDA
                raise PlanError(
                    f"stage {stage} of the plan is on 'rank:{rank}/{worker.device}', which rank {rank} has not.",
                    why=f"torch says: {str(error).splitlines()[0]}",
                    hint=f'"rank:{rank}", which is the device that it has',
                ) from error


@functools.cache
def device_of(worker: Worker) -> torch.device:
    """Returns the device of a worker, as torch knows it."""
    return torch.device(worker.device)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes `device` the current one in a `with` block, with its stream."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def check_rank(rank: int, num_ranks: int, where: str) -> None:
    """Raise if there is no such rank.

    Args:
        rank: As the program gave it.
        num_ranks: How many there are.
        where: What it was given to, for people.

    Raises:
        PlanError: It names the ranks there are.
    """
    if isinstance(rank, bool) or not isinstance(rank, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            f"{where}: a rank is a number from 0.", why=f"{rank!r} is a {type(rank).__name__}.", hint=_some(num_ranks)
        )
    if not 0 <= rank < num_ranks:
        processes = "1 process, rank:0" if num_ranks == 1 else f"{num_ranks} processes, rank:0 to rank:{num_ranks - 1}"
        raise PlanError(
            f"{where}: there is no rank {rank}.",
            why=f"this program runs on {processes}.",
            hint=f"{_some(num_ranks)}, or start it with: farspan run -n {max(rank, 0) + 1} train.py",
        )


def _some(num_ranks: int) -> str:
    return "rank 0" if num_ranks == 1 else f"a rank from 0 to {num_ranks - 1}"


def stage_number(teams: list[Team], team: Team, occurrence: int) -> int:
    """Returns the number of the `occurrence`-th stage that `team` runs; it is made if there is none."""
    for number, known in enumerate(teams):
        if known == team:
            if occurrence == 0:
                return number
            occurrence -= 1
    teams.append(team)
    return len(teams) - 1


def stages_at(teams: list[Team], text: str, devices: Sequence[RankDevices], num_ranks: int) -> tuple[int, ...]:
    """Returns the stages that lie at a place, the best first; one is made if there is none. The same on every rank.

    Args:
        teams: Of all stages that are known; may grow.
        text: "rank:1" for whichever device of that rank, "rank:1/cuda:0", "rank:1/cpu".
        devices: See `worker_at`.
        num_ranks: How many ranks there are.

    Raises:
        PlanError: There is no such rank, or no such device; or it is no place at all.
    """
    place = parse_place(text)
    check_rank(place.rank, num_ranks, f'"{text}"')
    worker = worker_at(place, devices)
    device = device_of(worker)
    found = [number for number, known in enumerate(teams) if known.owns and known.leader.rank == place.rank]
    if place.device is not None:
        found = [number for number in found if _is_on(device_of(teams[number].leader), device)]
    found.sort(key=lambda number: device_of(teams[number].leader) != device)
    return tuple(found) or (stage_number(teams, Team((worker,)), 0),)


def device_at(teams: list[Team], text: str, devices: Sequence[RankDevices], num_ranks: int) -> torch.device:
    """Returns the device at a place that the program names; like `stages_at`."""
    return device_of(teams[stages_at(teams, text, devices, num_ranks)[0]].leader)


def home_stages(teams: list[Team], num_ranks: int, devices: Sequence[RankDevices]) -> list[int]:
    """Returns a stage of each rank, one on its own device if it has none."""
    first = {team.leader.rank: number for number, team in reversed(list(enumerate(teams))) if team.owns}
    return [
        first[rank] if rank in first else stage_number(teams, Team((Worker(rank, own_device(rank, devices)),)), 0)
        for rank in range(num_ranks)
    ]


class _Planned(Protocol):
    """An engine, as the settings of a step see it; `Engine` says what each attribute is."""

    teams: list[Team]
    rank: int
    num_ranks: int
    lookahead: int
    schedule: str
    gradient_reduction: str
    devices: list[RankDevices]
    least_weight_work_s: float
    recorder: Any
    executor: Any


def settings_of(engine: _Planned) -> Settings:
    """Returns the settings with which the program of the next step is made; may add stages to the engine's."""
    recorder = engine.recorder
    homes = home_stages(engine.teams, engine.num_ranks, engine.devices) if recorder.outside.is_used else []
    return Settings(
        teams=tuple(engine.teams),
        rank=engine.rank,
        num_ranks=engine.num_ranks,
        lookahead=engine.lookahead,
        home_stages=tuple(homes),
        schedule=engine.schedule,
        least_weight_work_s=math.inf if recorder.hooks.are_there else engine.least_weight_work_s,
        gradient_reduction=engine.gradient_reduction,
        devices=tuple(engine.devices),
        replicas=engine.executor.replicas.known,
    )


def stage_of_inputs(teams: list[Team], rank: int, device: torch.device) -> int:
    """Returns the stage of `rank` where tensors of `device` lie that it has read; it is made if there is none."""
    for number, known in enumerate(teams):
        if known.owns and known.leader.rank == rank and known.leader.device_type == device.type:
            return number
    return stage_number(teams, Team((Worker(rank, str(device)),)), 0)


def settle_values(graphs: Sequence[Graph], teams: list[Team]) -> None:
    """Places what a wide or split stage has made, once it has run, on a stage of the member that made it: values, and
    gradients that have come to where a backward stops.
    """

    def home_of(stage: int, turn: int) -> int:
        return stage_number(teams, Team((teams[stage].member(turn),)), 0)

    for segment in [segment for graph in graphs for segment in graph.segments if not teams[segment.stage].owns]:
        home = home_of(segment.stage, segment.turn)
        for value in [value for call in segment.calls for value in call.outputs if value.stage == segment.stage]:
            value.stage = home
    waiting = [backward.stops.waiting for graph in graphs for backward in graph.backwards if backward.stops is not None]
    for stop in [stop for by_call in waiting for stops in by_call.values() for stop in stops]:
        if not teams[stop.stage].owns:
            stop.stage = home_of(stop.stage, stop.turn)


def _is_on(device: torch.device, wanted: torch.device) -> bool:
    return device == wanted or (wanted.index is None and device.type == wanted.type)

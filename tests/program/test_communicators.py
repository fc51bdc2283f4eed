"""NCCL by its rules: what a step's order of sends and receives must be, and why communicators are opened before it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.program.described import build_program
from tests.program.replay import chain, host_calls, stands_still
from tests.program.test_patterns import OTHERS, Step, made

from farspan.plan import Worker
from farspan.program.program import Channel, Program
from farspan.schedule import SCHEDULES

GPUS = [Worker(rank, "cuda:0") for rank in range(4)]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "num_micro_batches"), [("1f1b", 8), ("gpipe", 2), *((name, 1) for name in SCHEDULES)]
)
def test_communicators_that_a_first_transfer_makes_would_stand_still_in_the_first_step(
    schedule: str, num_micro_batches: int, num_ranks: int
) -> None:
    """1F1B always, GPipe with so many micro-batches as receives are posted ahead, each schedule in a plain loop."""
    workers = GPUS[:num_ranks]
    hosts = [host_calls(program, workers) for program in chain(workers, num_micro_batches, schedule)]
    standing = stands_still(hosts, are_open=False)
    assert len(standing) == num_ranks and {call.kind for call in standing} <= {"post", "send"}, "every host stands"


@pytest.mark.parametrize("has_skip", [False, True])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 8])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_communicators_that_are_open_every_step_ends(
    schedule: str, num_ranks: int, num_micro_batches: int, has_skip: bool
) -> None:
    workers = GPUS[:num_ranks]
    programs = chain(workers, num_micro_batches, schedule, has_skip=has_skip)
    hosts = [host_calls(program, workers) for program in programs]
    assert stands_still(hosts, are_open=True) == []
    for calls in hosts:
        assert [call for call in calls if call.current != torch.device(call.worker.device)] == [], "another GPU's"


@pytest.mark.parametrize("num_micro_batches", [1, 8])
@pytest.mark.parametrize("devices", ["00 01 10 11", "00 10 01 11", "00 10 11 01", "00 01 10 00 20 01"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_several_gpus_a_rank_every_step_ends(schedule: str, devices: str, num_micro_batches: int) -> None:
    """Also where stages come back to a rank, on another of its devices or on the same one."""
    workers = [Worker(int(rank), f"cuda:{device}") for rank, device in devices.split()]
    programs = chain(workers, num_micro_batches, schedule, has_skip=True)
    for rank, program in enumerate(programs):
        own = {worker for worker in workers if worker.rank == rank}
        assert len({action.queue for action in program.actions}) == len(own), "each device has an order of its own"
    hosts = [host_calls(program, workers) for program in programs]
    assert stands_still(hosts, are_open=True) == []
    for calls in hosts:
        assert [call for call in calls if call.current != torch.device(call.worker.device)] == [], "another GPU's"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_ranks_know_the_channels_of_all_gpus(schedule: str) -> None:
    first, *others = chain(GPUS, 4, schedule)
    assert all(program.gpu_channels == first.gpu_channels for program in others)
    ends = sorted((item.source.rank, item.target.rank, item.is_gradient) for item in first.gpu_channels)
    assert ends == [(0, 1, False), (1, 0, True), (1, 2, False), (2, 1, True), (2, 3, False), (3, 2, True)]


@settings(deadline=None, max_examples=60)
@given(
    st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in OTHERS.items()}),
    st.sampled_from(SCHEDULES),
    st.integers(0, 5),
)
def test_receives_are_posted_in_the_order_of_sends(different: dict[str, Any], schedule: str, lookahead: int) -> None:
    """Where tags say nothing, or are not looked at, the order is all there is."""
    different = {**different, "schedule": schedule, "lookahead": lookahead}
    sent: dict[Channel, list[Any]] = defaultdict(list)
    posted: dict[Channel, list[Any]] = defaultdict(list)
    awaited: dict[Channel, list[Any]] = defaultdict(list)
    for rank in range(different.get("num_ranks", Step.num_ranks)):
        program = build_program(*made(Step(**{**different, "rank": rank})))
        for messages, found in zip(_messages(program), (sent, posted, awaited), strict=True):
            for message in messages:
                found[message.channel].append((message.task, [item.meta for item in message.items]))
    assert sent == posted
    assert {channel: len(found) for channel, found in awaited.items()} == {
        channel: len(found) for channel, found in posted.items()
    }


def _messages(program: Program) -> tuple[list[Any], list[Any], list[Any]]:
    sent = program.prologue_sends + [message for action in program.actions for message in action.sends]
    beside = program.prologue_receives + program.reduction_messages
    posted = beside + [message for action in program.actions for message in action.posts]
    awaited = beside + [message for action in program.actions for message in action.receives]
    return sent, posted, awaited

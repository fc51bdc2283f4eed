"""Tasks that GPUs run are timed by events on their streams, read when the device has come so far."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farspan.execute.exchange import PaceNote
from farspan.execute.step.pace import DeviceClock, Pace
from farspan.execute.step.step_record import Trace

GPU = torch.device("cuda", 0)


class Event:
    """An event of a device whose clock is moved by hand."""

    now_ms = 0.0
    reached_ms = 0.0
    made = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self) -> None:
        self.at_ms = Event.now_ms

    def query(self) -> bool:
        return self.at_ms <= Event.reached_ms

    def elapsed_time(self, other: Any) -> float:
        return other.at_ms - self.at_ms  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    Event.now_ms = Event.reached_ms = 0.0
    Event.made = 0


def run(clock: DeviceClock, *seconds: float, device: torch.device = GPU) -> None:
    for each in seconds:
        clock.begin(device)
        Event.now_ms += 1e3 * each
        clock.end()
        Event.now_ms += 7.0  # it waits for a message


def test_times_are_known_when_the_device_has_come_so_far() -> None:
    clock = DeviceClock()
    run(clock, 0.5, 0.25)
    marks = clock.take()
    assert clock.seconds(marks) is None
    Event.reached_ms = Event.now_ms
    assert clock.seconds(marks) == pytest.approx([0.5, 0.25])
    assert clock.take() == []


def test_events_are_used_again() -> None:
    clock = DeviceClock()
    for _ in range(5):
        run(clock, 0.5, 0.25)
        Event.reached_ms = Event.now_ms
        assert clock.seconds(clock.take()) is not None
    assert Event.made == 4


def test_tasks_of_the_cpu_have_none() -> None:
    clock = DeviceClock()
    run(clock, 0.5, device=torch.device("cpu"))
    run(clock, 0.25)
    Event.reached_ms = Event.now_ms
    assert clock.seconds(clock.take()) == [None, pytest.approx(0.25)]


class Program:
    """What `Pace` asks of one."""

    has_several_workers = False


def trace(seconds: float) -> Trace:
    return Trace(kind="F", name="", micro_batch=0, queue=0, start_ns=0, end_ns=round(1e9 * seconds))


def notes_of(monkeypatch: pytest.MonkeyPatch, seconds: list[float], *, on_gpu: bool) -> list[PaceNote]:
    """The notes on steps of one task that took so long, on a GPU that is two steps behind; the host takes 1 ms."""
    pace: Any = Pace()
    pace.begin(lambda notes: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: on_gpu)
    monkeypatch.setattr(pace, "_keys_of", lambda graphs, program: [(0, "F", False, 0)])
    ends_ms: list[float] = []
    found: list[PaceNote] = []
    for each in seconds:
        clock = pace.begin_step()
        if clock is not None:
            run(clock, each)
        ends_ms.append(Event.now_ms)
        Event.reached_ms = ends_ms[-3] if len(ends_ms) > 2 else 0.0
        found.append(pace.note((), Program(), [trace(1e-3 if on_gpu else each)]))
    return found


def test_what_a_gpu_takes_is_compared_some_steps_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step in eight is timed, and stands for eight; the first five say what is usual."""
    notes = notes_of(monkeypatch, [0.1] * 64 + [0.25] * 64, on_gpu=True)
    compared = [(number, note) for number, note in enumerate(notes) if note.usual_s]
    assert [number for number, _ in compared] == [number + 2 for number in range(48, 126, 8)]
    assert [note.compared_s / note.usual_s for _, note in compared] == pytest.approx([1.0] * 2 + [2.5] * 8)
    assert compared[0][1].usual_s == pytest.approx(8 * 0.1)


def test_what_the_host_takes_is_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps warm up, five say what is usual: one of these was slow, and does not count."""
    notes = notes_of(monkeypatch, [9.0, 9.0, 0.1, 0.1, 5.0, 0.1, 0.1, 0.1, 0.25], on_gpu=False)
    assert all(note.usual_s == 0.0 for note in notes[:7])
    assert notes[7][:2] == pytest.approx((0.1, 0.1))
    assert notes[8][:2] == pytest.approx((0.25, 0.1))


def test_nothing_is_noted_where_nobody_wants_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Pace().note((), Program(), [trace(1.0)]) == PaceNote()  # type: ignore[arg-type]

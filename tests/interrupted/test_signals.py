"""Signals wait while torch runs Python inside its own code, and lose nothing by it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.launcher import TIMEOUT_S, Job

from farspan.launch.rank.interrupts import never_raises, signals_held

NUMBERS = (signal.SIGALRM, signal.SIGUSR2)


@pytest.fixture
def came() -> Iterator[list[int]]:
    """What comes: each number raises KeyboardInterrupt, too."""
    came: list[int] = []

    def handle(number: int, frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before = [signal.signal(number, handle) for number in NUMBERS]
    yield came
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


def test_a_signal_waits_for_the_end_of_the_body(came: list[int]) -> None:
    during: list[int] = []

    def both() -> None:
        with signals_held():
            signal.raise_signal(NUMBERS[0])
            signal.raise_signal(NUMBERS[1])
            during.append(len(came))

    with pytest.raises(KeyboardInterrupt):
        both()
    assert during == [0] and sorted(came) == sorted(NUMBERS)  # none is lost, though the first handler has raised


def test_a_second_one_does_not_wait(came: list[int]) -> None:
    def twice() -> None:
        with signals_held():
            signal.raise_signal(NUMBERS[0])
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(NUMBERS[0])
            assert came == [NUMBERS[0]]

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert came == [NUMBERS[0]] * 2


def test_handlers_are_as_before_or_as_the_body_leaves_them(came: list[int]) -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with signals_held():
        signal.signal(NUMBERS[0], signal.SIG_IGN)
    assert [signal.getsignal(number) for number in NUMBERS] == [signal.SIG_IGN, before[1]]


def test_a_handler_that_never_raises_does_not_wait(came: list[int]) -> None:
    @never_raises
    def handle(number: int, frame: object) -> None:
        came.append(number)

    signal.signal(NUMBERS[0], handle)
    with signals_held():
        signal.raise_signal(NUMBERS[0])
        assert came == [NUMBERS[0]]


def test_in_another_thread_nothing_is_held(came: list[int]) -> None:
    handlers: list[object] = []

    def run() -> None:
        with signals_held():
            handlers.append(signal.getsignal(NUMBERS[0]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(NUMBERS[0])]


def test_asyncio_hears_of_a_signal_once() -> None:
    """It listens to the descriptor that Python writes to when the signal comes."""
    came: list[int] = []

    async def run() -> None:
        asyncio.get_running_loop().add_signal_handler(NUMBERS[0], came.append, 1)
        with signals_held():
            signal.raise_signal(NUMBERS[0])
        await asyncio.sleep(0.05)

    asyncio.run(run())
    assert came == [1]


def test_what_comes_while_handlers_are_put_back_is_raised_and_loses_nothing(came: list[int], monkeypatch) -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    put_back = signal.signal

    def interrupted(number: int, handler: object) -> object:
        found = put_back(number, handler)  # pyright: ignore[reportArgumentType]
        if number == NUMBERS[1] and handler is before[1]:
            signal.raise_signal(number)
        return found

    def hold_one() -> None:
        with signals_held():
            signal.raise_signal(NUMBERS[0])
            monkeypatch.setattr(signal, "signal", interrupted)

    with pytest.raises(KeyboardInterrupt):
        hold_one()
    monkeypatch.undo()
    assert sorted(came) == sorted(NUMBERS) and [signal.getsignal(number) for number in NUMBERS] == before


INTERRUPTED = """
import torch, farspan
from torch import nn

class Interrupted(nn.Linear):
    def forward(self, x):
        if type(x) is not torch.Tensor:
            signal.raise_signal(signal.SIGINT)
            os.write(2, b'after it\\n')
        return super().forward(x)

signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest in the background ignores it
model = nn.Sequential(nn.Linear(2, 2), Interrupted(2, 2))
farspan.distribute(model)
model(torch.ones(1, 2))
print('not reached')
"""


def test_ctrl_c_while_a_module_runs_on_fakes_is_raised_after_that(tmp_path: Path) -> None:
    code, out, err = Job(tmp_path).run(INTERRUPTED, 1)
    assert code != 0 and "not reached" not in out
    assert "after it" in err and "KeyboardInterrupt" in err


IMPORTED = """
import signal, sys

class Interrupting:
    def find_spec(self, fullname, path, target=None):
        if fullname == 'torch.nn':
            signal.raise_signal(signal.SIGINT)
        return None

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
try:
    import torch
except KeyboardInterrupt:
    print('whole' if 'torch.utils.data' in sys.modules else 'in part')
"""


def test_ctrl_c_while_torch_is_imported_is_raised_after_that(tmp_path: Path) -> None:
    """What torch runs of C++ meanwhile aborts the process otherwise."""
    job = Job(tmp_path)
    assert job.run("if rank == 0: sys.exit()\n" + IMPORTED)[0] == 0
    assert job.log(1) == "whole\n"
    plain = [sys.executable, "-c", "import farspan" + IMPORTED]
    assert subprocess.run(plain, capture_output=True, text=True, timeout=TIMEOUT_S).stdout == "whole\n"

"""The power of the emulation: what is wrong on a real device is wrong here, too, and says where.

Each fault stands beside the same program without it.
"""

from __future__ import annotations

import pytest
from tests.emulated.conftest import Run

HEAD = """
import torch
side = torch.cuda.Stream()
main = torch.cuda.current_stream()
x = torch.ones(1000, device="cuda")
torch.cuda.synchronize()
"""
SLOW = {"lag_us": 0}
"""Without drawn lags: where a program occupies a stream itself."""


def test_missing_event_shows(run: Run) -> None:
    code = (
        HEAD
        + """
torch.cuda._sleep(50_000_000)
x.add_(1)
with torch.cuda.stream(side):
    EVENT
    y = x * 2
side.synchronize()
print(y.sum().item())
"""
    )
    wrong = run(code=code.replace("EVENT", "pass"), **SLOW)
    assert float(wrong.out) != 4000.0
    assert len(wrong.races) == 1
    assert "written by add " in wrong.races[0] and "read by mul " in wrong.races[0]
    assert "script.py:9" in wrong.races[0] and "script.py:12" in wrong.races[0]
    right = run(code=code.replace("EVENT", "side.wait_stream(main)"), **SLOW)
    assert (float(right.out), right.races) == (4000.0, [])


def test_missing_record_stream_shows(run: Run) -> None:
    code = (
        HEAD
        + """
side.wait_stream(main)
with torch.cuda.stream(side):
    torch.cuda._sleep(50_000_000)
    y = x * 2
RECORD
del x
z = torch.zeros(1000, device="cuda")  # the same memory again
side.synchronize()
print(y.sum().item())
"""
    )
    wrong = run(code=code.replace("RECORD", ""), **SLOW)
    assert float(wrong.out) != 2000.0
    assert any("freed memory" in race for race in wrong.races)
    right = run(code=code.replace("RECORD", "x.record_stream(side)"), **SLOW)
    assert (float(right.out), right.races) == (2000.0, [])


def test_memory_of_another_stream_shows(run: Run) -> None:
    """What a side stream has allocated is given away by its own frees, whoever else uses it."""
    code = (
        HEAD
        + """
with torch.cuda.stream(side):
    y = torch.full((1000,), 3.0, device="cuda")
main.wait_stream(side)
torch.cuda._sleep(50_000_000)
z = y * 2
RECORD
del y
print(z.sum().item())
"""
    )
    assert any("freed memory" in race for race in run(code=code.replace("RECORD", ""), **SLOW).races)
    right = run(code=code.replace("RECORD", "y.record_stream(main)"), **SLOW)
    assert (float(right.out), right.races) == (6000.0, [])


def test_copy_read_too_early_shows(run: Run) -> None:
    code = (
        HEAD
        + """
torch.cuda._sleep(50_000_000)
host = x.to("cpu", non_blocking=True)
WAIT
print(host.sum().item())
"""
    )
    assert run(code=code.replace("WAIT", ""), **SLOW).out.strip() == "nan"
    assert float(run(code=code.replace("WAIT", "main.synchronize()"), **SLOW).out) == 1000.0


def test_pinned_source_written_too_early_shows(run: Run) -> None:
    code = (
        HEAD
        + """
host = torch.ones(1000).MEMORY
torch.cuda._sleep(50_000_000)
y = host.to("cuda", non_blocking=True)
host.fill_(7)
print(y.sum().item())
"""
    )
    assert float(run(code=code.replace("MEMORY", "pin_memory()"), **SLOW).out) == 7000.0
    assert float(run(code=code.replace("MEMORY", "clone()"), **SLOW).out) == 1000.0


def test_host_that_touches_memory_of_a_device_is_stopped(run: Run) -> None:
    code = (
        HEAD
        + """
import ctypes
def peek():
    return ctypes.string_at(x.data_ptr(), 4)
peek()
"""
    )
    ended = run(code=code, fails=True)
    assert ended.code < 0
    assert "the host touched memory of device 0" in ended.error
    assert "in peek" in ended.error


@pytest.mark.parametrize(
    "line",
    [
        "x + torch.ones(1000)",
        "x + torch.ones(1000, device='cuda:1')",
        "torch.cat([x, torch.ones(2)])",
        "torch.nn.functional.linear(x, torch.ones(3, 1000, device='cuda:1'))",
    ],
)
def test_tensors_of_two_devices_are_refused(run: Run, line: str) -> None:
    ended = run(code=HEAD + line, fails=True)
    assert "Expected all tensors to be on the same device" in ended.error


def test_error_of_a_kernel_comes_at_the_next_wait(run: Run) -> None:
    code = (
        HEAD
        + """
y = x[torch.tensor([5000], device="cuda")]
print("launched")
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print(error)
"""
    )
    ended = run(code=code)
    assert ended.out.startswith("launched\nCUDA error")
    assert "out of bounds" in ended.out


def test_wait_past_its_deadline_is_an_error(run: Run) -> None:
    code = HEAD + "torch.cuda._sleep(10_000_000_000)\ntorch.cuda.synchronize()\n"
    ended = run(code=code, fails=True, deadline_s=1)
    assert 'has not come to an end in 1 s: it is at "occupy"' in ended.error


def test_memory_runs_out(run: Run) -> None:
    code = (
        HEAD
        + """
try:
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)
y = torch.empty(16 << 20, dtype=torch.uint8, device="cuda:1")
del y
print(torch.cuda.memory_allocated(1), torch.cuda.max_memory_allocated(1))
"""
    )
    ended = run(code=code, memory_mib=32)
    assert "out of memory" in ended.out
    assert ended.out.splitlines()[-1] == f"0 {16 << 20}"


def test_fork_is_refused(run: Run) -> None:
    code = (
        HEAD
        + """
import os
if os.fork() == 0:
    try:
        torch.cuda.set_device(0)
        torch.cuda._lazy_init()
        print(torch.cuda._is_in_bad_fork())
    finally:
        os._exit(0)
os.wait()
"""
    )
    run(code=code)

"""A test whose ranks hang ends with the stacks of all of them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.support.launcher import READY, Job
from tests.support.ranks import run_processes, run_threads
from tests.support.warm.commands import farspan_run

WAITS = """
import os, threading

def waits_for_ever():
    threading.Event().wait()

def waits_for_the_other_rank():
    waits_for_ever()

(waits_for_ever if os.environ.get("RANK", "0") == "0" else waits_for_the_other_rank)()
"""


def test_ranks_that_are_threads() -> None:
    event = threading.Event()

    def waits_for_the_other_rank() -> None:
        event.wait()

    with pytest.raises(AssertionError, match="a rank hangs") as caught:
        run_threads(
            2, lambda rank: waits_for_the_other_rank() if rank else event.wait(), patience_s=0.1, deadline_s=0.1
        )
    event.set()
    before, _, after = str(caught.value).partition("rank 1:")
    assert "rank 0:" in before and "event.wait()" in before and "in waits_for_the_other_rank" not in before
    assert "in waits_for_the_other_rank" in after


def test_ranks_that_are_processes(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    with pytest.raises(AssertionError, match=r"had not ended after 6\.0 s") as caught:
        run_processes(2, script, timeout_s=6.0)
    before, _, after = str(caught.value).partition("rank 1 (exit code")
    assert "in waits_for_ever" in before and "in waits_for_the_other_rank" not in before
    assert "in waits_for_the_other_rank" in after


def test_ranks_of_a_launcher(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    with pytest.raises(AssertionError, match=r"not ended after 6\.0 s") as caught:
        farspan_run(["-n", "2", "--log-dir", str(tmp_path / "logs"), str(script)], timeout_s=6.0)
    assert "stacks of rank 0" in str(caught.value) and "stacks of rank 1" in str(caught.value)
    assert str(caught.value).count("in waits_for_ever") == 2


def test_ranks_of_a_launcher_that_is_started_as_users_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    job.start(READY + WAITS)
    for rank in (0, 1):
        job.pid(rank)
    monkeypatch.setattr("tests.support.launcher.TIMEOUT_S", 0.5)
    with pytest.raises(AssertionError, match=r"not ended after 0\.5 s") as caught:
        job.end()
    assert str(caught.value).count("in waits_for_ever") >= 2

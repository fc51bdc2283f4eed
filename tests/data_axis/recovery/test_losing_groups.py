"""Runs under `farspan run --keep-going` that lose groups of ranks: the others go on, with the same numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.data_axis.recovery import lose_a_group
from tests.support.launcher import keep_going

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are tied to the launcher there")


def run(
    folder: Path, num_ranks: int, num_groups: int, *kills: Any, options: tuple[str, ...] = ()
) -> tuple[subprocess.CompletedProcess[str], dict[int, Any]]:
    folder.mkdir()
    script = [str(Path(lose_a_group.__file__)), str(folder), str(num_groups), *map(str, kills)]
    done = keep_going(folder, num_ranks, script, options)
    found = {number: folder / f"group{number}" for number in range(num_groups)}
    return done, {number: json.loads(path.read_text()) for number, path in found.items() if path.exists()}


def first_steps_without(done: subprocess.CompletedProcess[str]) -> list[int]:
    """For each loss the first step whose mean is without the lost group, as the console says it.

    A rank that dies after its step may have been the only one to know that all had the mean: then the others, who have
    used nothing of it, take that step without it.
    """
    return [int(step) for step in re.findall(r"from step ([0-9]+) \(counted from 0\)", done.stderr)]


def test_a_group_that_loses_a_rank_is_left_out_of_the_mean_from_that_step_on(tmp_path: Path) -> None:
    done, results = run(tmp_path / "run", 2, 2, 1, 2, "computed")
    assert done.returncode == 0, done.stderr
    assert "rank 1 was killed by SIGKILL; the run goes on without rank 1\n" in done.stderr
    assert "1 of 2 groups of ranks goes on: from step 2 (counted from 0) gradients are the mean over" in done.stderr
    losses, state = lose_a_group.train(lambda step: [0, 1] if step < 2 else [0])
    assert list(results) == [0]
    assert results[0]["losses"] == losses[0] and results[0]["state"] == state  # bit for bit
    places = results[0]["places"]  # the other rank may be lost while this one is still at the end of step 1
    assert places[0] == [0, 2] and places[1] in ([0, 2], [0, 1]) and places[2:] == [[0, 1]] * 4
    assert done.stdout.splitlines() == [f"step {step}" for step in range(6)]


def test_the_first_group_may_be_the_one_that_is_lost(tmp_path: Path) -> None:
    done, results = run(tmp_path / "run", 4, 2, 0, 3, "before")
    assert done.returncode == 0, done.stderr
    (lost_at,) = first_steps_without(done)
    assert lost_at in (2, 3)
    losses, state = lose_a_group.train(lambda step: [0, 1] if step < lost_at else [1])
    assert list(results) == [1]
    assert results[1]["losses"] == losses[1] and results[1]["state"] == state
    assert results[1]["places"][:2] == [[1, 2]] * 2 and results[1]["places"][3:] == [[0, 1]] * 3
    assert done.stdout.splitlines()[-3:] == [f"step {step}" for step in range(3, 6)]  # on the console, as before
    journal = (tmp_path / "run" / "journal").read_text().splitlines()
    assert journal == [f"{step} 1" for step in range(6)]  # the files are those of one process: the first that is left


def test_several_groups_are_lost_one_after_the_other(tmp_path: Path) -> None:
    done, results = run(tmp_path / "run", 3, 3, 1, 1, "before", 0, 3, "after")
    assert done.returncode == 0, done.stderr
    assert list(results) == [2]
    assert results[2]["places"][1] == [1, 2] and results[2]["places"][4] == [0, 1]
    first, second = first_steps_without(done)
    assert first == 1 and second in (3, 4)
    losses, _ = lose_a_group.train(lambda step: [0, 1, 2] if step < first else [0, 2] if step < second else [2])
    assert results[2]["losses"] == pytest.approx(losses[2], rel=1e-5)  # gloo adds three shares in an order of its own


def test_nothing_goes_on_without_another_group(tmp_path: Path) -> None:
    done, results = run(tmp_path / "run", 2, 1, 1, 2, "before")
    assert done.returncode == 128 + 9 and not results
    assert "was killed by SIGKILL, and the ranks are not divided into groups (data_parallel), and have" in done.stderr


def test_all_are_started_again_when_no_group_is_left(tmp_path: Path) -> None:
    kills = (1, 1, "before", 0, 3, "before")
    done, results = run(tmp_path / "run", 2, 2, *kills, options=("--max-restarts", "1"))
    assert done.returncode == 0, done.stderr
    assert "rank 0 was killed by SIGKILL, and no other group is left: all ranks end" in done.stderr
    assert "restart 1 of 1" in done.stderr
    losses, _ = lose_a_group.train(lambda step: [0, 1])
    assert {group: found["losses"] for group, found in results.items()} == losses

"""Runs under `farspan run --keep-going` that lose members of wide stages: the others have the bits of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.execute.copies import lose_a_member
from tests.support.launcher import keep_going

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are tied to the launcher there")

WIDE = {"*": "rank:0+rank:1+rank:2"}


def run(
    folder: Path, num_ranks: int, plan: dict[str, str], optimizer: str, *kills: Any, options: tuple[str, ...] = ()
) -> tuple[subprocess.CompletedProcess[str], dict[int, Any]]:
    folder.mkdir()
    script = [str(Path(lose_a_member.__file__)), str(folder), json.dumps(plan), optimizer, *map(str, kills)]
    done = keep_going(folder, num_ranks, script, options)
    found = {number: folder / f"rank{number}" for number in range(num_ranks)}
    return done, {number: json.loads(path.read_text()) for number, path in found.items() if path.exists()}


def in_one_process(optimizer: str) -> dict[str, Any]:
    return lose_a_member.train(lose_a_member.build(), lambda step, moment: None, optimizer)


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    assert found["read"] == expected["read"]
    assert found["state"] == expected["state"]


def test_members_are_lost_one_after_the_other_in_steps_and_in_evaluation(tmp_path: Path) -> None:
    kills = (2, 2, "forward", 0, 4, "evaluated")
    done, results = run(tmp_path / "run", 3, WIDE, "AdamW", *kills)
    assert done.returncode == 0, done.stderr
    assert "rank 2 was killed by SIGKILL; 2 ranks go on with copies of what it had" in done.stderr
    assert "rank 0 was killed by SIGKILL; 1 rank goes on with copies of what it had" in done.stderr
    assert list(results) == [1]
    check_same(results[1], in_one_process("AdamW"))
    assert results[1]["rank"] == 0 and results[1]["stages"] == ["rank:0"]
    assert done.stdout.splitlines()[-2:] == ["step 5", "step 6"]  # on the console, as before


def test_what_is_copied_counts_when_all_have_it(tmp_path: Path) -> None:
    plan = {"[0-2]*": "rank:0+rank:1", "[34]*": "rank:2"}
    done, results = run(tmp_path / "run", 3, plan, "SGD", 1, 3, "brought")
    assert done.returncode == 0, done.stderr
    assert list(results) == [0, 2]
    expected = in_one_process("SGD")
    for found in results.values():
        check_same(found, expected)
    assert results[2]["rank"] == 1 and results[2]["stages"] == ["rank:0", "rank:1"]


def test_a_step_that_one_rank_knows_to_be_complete_is_not_run_again(tmp_path: Path) -> None:
    done, results = run(tmp_path / "run", 3, WIDE, "Adagrad", 0, 3, "committed")
    assert done.returncode == 0, done.stderr
    assert list(results) == [1, 2]
    expected = in_one_process("Adagrad")
    for found in results.values():
        check_same(found, expected)


def test_nothing_goes_on_without_a_rank_of_which_there_are_no_copies(tmp_path: Path) -> None:
    plan = {"[0-2]*": "rank:0+rank:1", "[34]*": "rank:2"}
    done, results = run(tmp_path / "run", 3, plan, "AdamW", 2, 3, "recorded")
    assert done.returncode == 128 + 9 and not results
    assert "rank 2 was killed by SIGKILL, and no other rank has copies of what it had: all ranks end" in done.stderr


def test_all_are_started_again_where_the_copies_are_not_what_was_lost(tmp_path: Path) -> None:
    options = ("--max-restarts", "1")
    done, results = run(tmp_path / "run", 3, WIDE, "AdamW", 1, 0, "stepped", options=options)
    assert "AdamW has stepped for the first time, or after a change, and no step has ended since" in done.stderr
    assert done.returncode == 0, done.stderr
    expected = in_one_process("AdamW")
    assert list(results) == [0, 1, 2]
    for found in results.values():
        check_same(found, expected)

"""What a program sees of its group: its number, its batches, the weights that all begin with, what the model draws."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_processes

TELL = Path(__file__).parent / "tell_groups.py"
TRAIN = Path(__file__).parent / "train_in_groups.py"
FAIL = Path(__file__).parent / "fail_in_groups.py"
CHOOSE = Path(__file__).parent / "choose_groups.py"


@functools.cache
def told(num_ranks: int) -> list[dict[str, Any]]:
    finished = run_processes(num_ranks, TELL, ["2"])
    assert [process.stderr for process in finished if process.code] == []
    return [json.loads(process.stdout.splitlines()[-1]) for process in finished]


@pytest.mark.parametrize(
    ("num_ranks", "after"), [(2, [[0, 2, 0], [1, 2, 0]]), (4, [[0, 2, 0], [0, 2, 1], [1, 2, 0], [1, 2, 1]])]
)
def test_the_number_of_the_group(num_ranks: int, after: list[list[int]]) -> None:
    assert [found["before"] for found in told(num_ranks)] == [[0, 1]] * num_ranks
    assert [found["after"] for found in told(num_ranks)] == after


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_begin_with_the_weights_of_rank_0(num_ranks: int) -> None:
    torch.manual_seed(0)
    first = torch.nn.Linear(4, 8).weight.tolist()
    assert all(found["weights"] == told(num_ranks)[0]["weights"] for found in told(num_ranks))
    assert told(num_ranks)[0]["weights"]["0.weight"] == first


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_models_draw_other_numbers_in_each_group_and_programs_the_same(num_ranks: int) -> None:
    """So a program may choose its group's part of a permutation that it draws."""
    for found in told(num_ranks):
        assert found["model is followed by"] == found["plain is followed by"]
        is_first = found["after"][0] == 0
        assert (found["model gives"] == found["plain gives"]) == is_first
        assert found["model gives"][0] != found["model gives"][1]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_reads_for_its_own_group(num_ranks: int) -> None:
    assert [found["given"] for found in told(num_ranks)] == [8.0] * (num_ranks // 2) + [16.0] * (num_ranks // 2)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_line_search_finds_the_same_in_all_groups(num_ranks: int) -> None:
    """It reads what the closure returns: the mean over the groups."""
    for found in told(num_ranks):
        assert found["minimized"] == told(num_ranks)[0]["minimized"]
        for ours, theirs in zip(found["minimized"], found["wanted"], strict=True):
            assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), atol=1e-4)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_nothing_is_sent_for_frozen_parameters(num_ranks: int) -> None:
    """Of the second linear layer a weight and a bias, and for each of the two whether a group has a gradient."""
    found = [each["sent"] for each in told(num_ranks)]
    assert sum(found) / 2 == 8 * 2 + 2 + 2


def test_the_same_batches_in_all_groups_are_warned_of_once() -> None:
    finished = run_processes(2, FAIL, ["2", "same batches"])
    assert [process.stderr.count("train on the same batches") for process in finished] == [1, 0]


def test_other_batches_are_not() -> None:
    finished = run_processes(2, FAIL, ["2", "nothing"])
    assert [process.stderr.count("train on the same batches") for process in finished] == [0, 0]
    assert [process.stdout for process in finished] == ["over\n", "over\n"]


def test_weights_that_differ_between_groups_are_noticed() -> None:
    finished = run_processes(2, FAIL, ["2", "other weights"])
    assert [process.code for process in finished] == [1, 1]
    assert all("the groups have different weights: 2.bias." in process.stderr for process in finished)


def test_the_planner_chooses_the_number_of_groups() -> None:
    """A small model on one host: as many as there are ranks; rows are trained as in one process."""
    found = [json.loads(each.stdout.splitlines()[-1]) for num in (1, 2) for each in run_processes(num, CHOOSE, [])]
    assert [number for number, _ in found] == [1, 2, 2]
    alone, *groups = [torch.tensor(weights) for _, weights in found]
    assert torch.equal(groups[0], groups[1])
    assert torch.allclose(groups[0], alone, atol=1e-6)

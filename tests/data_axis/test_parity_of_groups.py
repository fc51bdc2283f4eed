"""Groups train as one process does that averages the gradients of their batches itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.data_axis.train_in_groups import CASES
from tests.support.ranks import run_processes

PROGRAM = Path(__file__).parent / "train_in_groups.py"
TOLERANCE = 1e-6
_NAMES = list(CASES)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("names", [_NAMES[begin : begin + 6] for begin in range(0, len(_NAMES), 6)], ids="-".join)
def test_same_numbers_as_one_process_that_averages(num_ranks: int, names: list[str]) -> None:
    """Losses, norms and weights, of all groups."""
    finished = run_processes(num_ranks, PROGRAM, ["2", *names])
    assert [process.stderr for process in finished if process.code] == []
    for process in finished:
        differences = json.loads(process.stdout.splitlines()[-1])["differences"]
        assert {name: off for name, off in differences.items() if off > TOLERANCE} == {}


def test_two_runs_give_the_same_bits() -> None:
    """Also of three groups, where sums depend on their order."""
    for num_groups in (2, 3):
        runs = [run_processes(num_groups, PROGRAM, [str(num_groups), "plain", "read between"]) for _ in range(2)]
        assert [process.stderr for run in runs for process in run if process.code] == []
        first, second = ([json.loads(process.stdout.splitlines()[-1]) for process in run] for run in runs)
        assert first == second
        assert all(off < TOLERANCE for each in first for off in each["differences"].values())

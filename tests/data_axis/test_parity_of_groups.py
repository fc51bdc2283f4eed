"""Groups train as one process does that averages the gradients of their batches itself."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from tests.data_axis.lockstep import Found, as_numbers, in_one_process
from tests.data_axis.train_in_groups import CASES
from tests.support.ranks import run_processes

PROGRAM = Path(__file__).parent / "train_in_groups.py"
TOLERANCE = 1e-6
_NAMES = list(CASES)
_RUNS = [(num_ranks, _NAMES[begin : begin + 6]) for num_ranks in (2, 4) for begin in range(0, len(_NAMES), 6)]
"""All cases with groups of two ranks, some with groups of one."""


@functools.cache
def found_in_one_process(name: str) -> list[Found]:
    """What each of two groups finds; the ranks need not find it again."""
    with torch.random.fork_rng():
        return [as_numbers(found) for found in in_one_process(CASES[name], 2)]


@pytest.mark.parametrize(
    ("num_ranks", "names"), _RUNS, ids=lambda item: str(item) if item in (2, 4) else "-".join(item)
)
def test_same_numbers_as_one_process_that_averages(num_ranks: int, names: list[str], tmp_path: Path) -> None:
    """Losses, norms and weights, of all groups."""
    wanted = tmp_path / "wanted.json"
    wanted.write_text(json.dumps({name: found_in_one_process(name) for name in names}))
    finished = run_processes(num_ranks, PROGRAM, ["2", *names], environment={"IN_ONE_PROCESS": str(wanted)})
    assert [process.stderr for process in finished if process.code] == []
    for process in finished:
        differences = json.loads(process.stdout.splitlines()[-1])["differences"]
        assert {name: off for name, off in differences.items() if off > TOLERANCE} == {}


@pytest.mark.parametrize("num_groups", [2, 3])
def test_two_runs_give_the_same_bits(num_groups: int) -> None:
    """Of three groups sums depend on their order."""
    runs = [run_processes(num_groups, PROGRAM, [str(num_groups), "plain", "read between"]) for _ in range(2)]
    assert [process.stderr for run in runs for process in run if process.code] == []
    first, second = ([json.loads(process.stdout.splitlines()[-1]) for process in run] for run in runs)
    assert first == second
    assert all(off < TOLERANCE for each in first for off in each["differences"].values())

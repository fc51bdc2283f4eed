"""Same numbers: gradients and weights after three AdamW steps, bit for bit, for every plan and number of ranks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from tests.support.cases import CASES
from tests.support.parity import all_plans, build, last_plan, train_distributed, train_plainly
from tests.support.ranks import run_processes, run_threads

PROGRAM = Path(__file__).parents[1] / "programs" / "parity.py"


_SEVERAL = ("mlp", "gpt_tied", "unet", "siamese")


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    list(itertools.product(CASES, (1, 2, 3, 4))),
)
def test_same_numbers_as_one_process(name: str, num_ranks: int) -> None:
    """Under each of its plans."""
    case = CASES[name]
    wanted = train_plainly(case)
    for plan_name, plan in all_plans(case, num_ranks).items():
        models = [build(case) for _ in range(num_ranks)]
        histories = run_threads(num_ranks, lambda rank: train_distributed(models[rank], case, plan))  # noqa: B023
        for rank, history in enumerate(histories):
            assert history.differences(wanted) == [], f"plan {plan_name}, rank {rank}"


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *((name, "zero-bubble") for name in CASES),
        *((name, kind) for kind in ("1f1b", "gpipe") for name in _SEVERAL),
    ],
)
def test_same_numbers_under_every_schedule(name: str, schedule: str) -> None:
    """Under zero-bubble every backward that another rank waits for is split."""
    case, num_ranks = CASES[name], 3
    wanted = train_plainly(case)
    for plan_name, plan in last_plan(case, num_ranks).items():
        models = [build(case) for _ in range(num_ranks)]
        histories = run_threads(
            num_ranks,
            lambda rank: train_distributed(models[rank], case, plan, schedule=schedule),  # noqa: B023
        )
        for rank, history in enumerate(histories):
            assert history.differences(wanted) == [], f"plan {plan_name}, rank {rank}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_processes", "names"),
    [
        (1, ["gpt_tied"]),
        (2, ["gpt_tied", "siamese"]),
        (3, ["mlp", "unet"]),
        *((number, list(CASES)) for number in (1, 2, 3, 4)),
    ],
)
def test_same_numbers_as_one_process_over_real_processes(num_processes: int, names: list[str]) -> None:
    for rank, process in enumerate(run_processes(num_processes, PROGRAM, names, timeout_s=240.0)):
        assert process.code == 0, process.stderr
        found = json.loads(process.stdout.splitlines()[-1])
        assert len(found) == len(names)
        assert {name: differences for name, differences in found.items() if differences} == {}, f"rank {rank}"

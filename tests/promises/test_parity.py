"""Same numbers: gradients and weights after three AdamW steps, bit for bit, for every plan and number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.cases import CASES
from tests.support.parity import all_plans, build, last_plan, train_distributed, train_plainly
from tests.support.ranks import run_processes, run_threads

PROGRAM = Path(__file__).parents[1] / "programs" / "parity.py"


_SEVERAL = ("mlp", "gpt_tied", "unet", "siamese")
_LONG = ("varying_sizes",)
_OFTEN = {1: ("mlp", "gpt_tied"), 2: tuple(CASES), 3: ("mlp", "unet"), 4: ("siamese",)}
"""What runs for every submission, as threads; all of it does in the slow tier, as processes too."""
_OFTEN_UNDER = {"1f1b": ("mlp", "gpt_tied"), "gpipe": ("unet", "siamese")}


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        pytest.param(name, number, marks=() if name in _OFTEN[number] else pytest.mark.slow)
        for name in CASES
        for number in (1, 2, 3, 4)
    ],
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
        *(pytest.param(name, "zero-bubble", marks=pytest.mark.slow if name in _LONG else ()) for name in CASES),
        *(
            pytest.param(name, kind, marks=() if name in often else pytest.mark.slow)
            for kind, often in _OFTEN_UNDER.items()
            for name in _SEVERAL
        ),
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
        *(pytest.param(number, list(CASES), marks=pytest.mark.slow) for number in (1, 2, 3, 4)),
    ],
)
def test_same_numbers_as_one_process_over_real_processes(num_processes: int, names: list[str]) -> None:
    for rank, process in enumerate(run_processes(num_processes, PROGRAM, names, timeout_s=240.0)):
        assert process.code == 0, process.stderr
        found = json.loads(process.stdout.splitlines()[-1])
        assert len(found) == len(names)
        assert {name: differences for name, differences in found.items() if differences} == {}, f"rank {rank}"

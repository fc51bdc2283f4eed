"""Same numbers: gradients and weights after three AdamW steps, bit for bit, for every plan and number of ranks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.cases import CASES
from tests.support.parity import all_plans, build, last_plan, train_distributed, train_plainly
from tests.support.ranks import run_processes, run_threads
from torch import Tensor, nn

import farspan

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


class Scaled(nn.Module):
    """Computes in float32, in autocast too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * self.scale


class GatedUnit(nn.Module):
    """Casts what `first` gives twice, in autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled()
        self.gate, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.down(F.silu(self.gate(h)) * self.up(h))


def test_gradients_of_two_casts_of_a_tensor_from_another_rank_add_up_in_its_own_precision() -> None:
    """Autocast keeps the cast of a leaf of autograd, which the tensor is on its new rank, and not of an activation."""

    def built() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), GatedUnit(), nn.Linear(16, 16))

    def gradients(model: Any) -> list[Any]:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8, 16)).float().square().mean()
        loss.backward()
        return [item.grad.tolist() for item in model.parameters()]

    wanted = gradients(built())
    for remat in (False, True):
        plan = {"0": 0, "1.first": 0, "1.gate": 1, "1.up": 1, "1.down": 1, "2": 1}
        models = [built() for _ in range(2)]
        found = run_threads(2, lambda rank: gradients(farspan.distribute(models[rank], plan=plan, remat=remat)))  # noqa: B023
        assert found == [wanted] * 2

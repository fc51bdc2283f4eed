"""A model repartitioned while it trains: the same numbers to the last bit, whatever goes where after each step."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.optimizers.written import OneForAll
from tests.support.cases import CASES, Case
from tests.support.parity import build, train, train_plainly
from tests.support.places import engine
from tests.support.ranks import run_processes, run_threads
from torch import nn

import farspan
from farspan.place.places import replace_plan
from farspan.place.repartition.moved_states import _memory_of
from farspan.plan import Plan
from farspan.profile import units_of

RANKS = 3
PROGRAM = Path(__file__).parents[1] / "programs" / "moving.py"


def random_plan(model: nn.Module, generator: random.Random) -> Plan:
    """Each unit on any rank, as a stage of its own or with others; some ranks may have none."""
    units = [unit.name for unit in units_of(model, RANKS)]
    ranks = generator.sample(range(RANKS), generator.randint(1, RANKS))
    stages = [f"rank:{generator.choice(ranks)}" for _ in range(generator.randint(1, 4))]
    return Plan(stages=tuple(stages), placement={name: generator.randrange(len(stages)) for name in units})


def moved_bytes(model: nn.Module, plan: Plan) -> int | None:
    users: list[str] = []
    size_bytes = replace_plan(engine(), model, plan, users)
    assert (size_bytes is None) is bool(users)
    return size_bytes


def train_moving(model: nn.Module, case: Case, seed: int, moved: list[int | None]) -> Any:
    farspan.distribute(model, plan=random_whole_plan(model, seed))
    generator = random.Random(seed)
    engine().after_step.append(lambda: moved.append(moved_bytes(model, random_plan(model, generator))))
    return train(model, case)


def random_whole_plan(model: nn.Module, seed: int) -> Plan:
    """Of each rank a stage, as `distribute` asks for."""
    units = [unit.name for unit in units_of(model, RANKS)]
    stages = {name: number % RANKS for number, name in enumerate(random.Random(seed).sample(units, len(units)))}
    return Plan(stages=tuple(f"rank:{rank}" for rank in range(RANKS)), placement=stages)


@pytest.mark.parametrize(
    ("name", "seed"),
    list(itertools.product(CASES, (0, 1))),
)
def test_same_numbers_whatever_moves_after_each_step(name: str, seed: int) -> None:
    case = CASES[name]
    if case.most_stages < RANKS:
        pytest.skip("it has fewer units than there are ranks")
    wanted = train_plainly(case)
    models = [build(case) for _ in range(RANKS)]
    moved: list[list[int | None]] = [[] for _ in range(RANKS)]
    histories = run_threads(RANKS, lambda rank: train_moving(models[rank], case, seed, moved[rank]))
    for rank, history in enumerate(histories):
        assert history.differences(wanted) == [], f"rank {rank}"
    assert all(each == moved[0] for each in moved)
    assert any(moved[0]), "nothing moved"


class Laid(nn.Module):
    """Its matrices do not lie in memory row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8).t())
        self.scale = nn.Buffer(torch.rand(8, 8).t().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight * 0.3) @ self.scale * 0.3


class Words(nn.Module):
    """A word vector for each row of a batch, with sparse gradients, and some layers."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(9, 8, sparse=True)
        self.layers = nn.Sequential(Laid(), nn.Linear(8, 8), Laid(), nn.Linear(8, 8))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layers(self.vectors(words))


def train_words(model: nn.Module) -> Any:
    """Of two optimizers each second one steps; the program reads and writes what they keep, also what it has taken."""
    parameters = list(model.parameters())
    optimizers = [
        torch.optim.SparseAdam(parameters[:1]),
        OneForAll(parameters[1:4]),
        torch.optim.Adam(parameters[4:], lr=0.01),
    ]
    generator = torch.Generator().manual_seed(1)
    taken: list[torch.Tensor] = []
    seen: list[Any] = []
    for step in range(6):
        model(torch.randint(9, (5,), generator=generator)).square().mean().backward()
        for optimizer in [optimizers[step % 2], optimizers[2]]:
            optimizer.step()
            optimizer.zero_grad()
            seen.append([float(state["step"]) for state in optimizers[2].state.values()])
        if step == 1:
            taken = [optimizers[2].state[p]["exp_avg"] for p in parameters[4:]]
        if step == 3:
            taken[0].mul_(0.5)
            optimizers[2].state[parameters[-1]]["exp_avg_sq"].mul_(2.0)
        seen.append([each.tolist() for each in taken])
        seen.append([(item.stride(), item.tolist()) for item in model.state_dict().values()])
    return seen


def test_what_optimizers_share_sparse_gradients_and_layouts_go_along_or_stay() -> None:
    torch.manual_seed(0)
    wanted = train_words(Words())
    models: list[nn.Module] = []
    for _ in range(RANKS):
        torch.manual_seed(0)
        models.append(Words())

    def program(rank: int) -> Any:
        model = farspan.distribute(models[rank], plan=random_whole_plan(models[rank], 3))
        generator = random.Random(4)
        engine().after_step.append(lambda: moved.append(moved_bytes(model, random_plan(model, generator))))
        return train_words(model)

    moved: list[int | None] = []
    for rank, found in enumerate(run_threads(RANKS, program)):
        assert found == wanted, f"rank {rank}"
    assert any(moved)


def train_by_line_search(model: nn.Module) -> list[Any]:
    """LBFGS has a list of all parameters among its attributes."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.eye(8)) - 0.3).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    return [losses, [item.tolist() for item in model.state_dict().values()]]


def train_by_turns(model: nn.Module) -> dict[str, list[float]]:
    """Two optimizers, one after the other: what moves in between has a gradient that is still needed."""
    named = list(model.named_parameters())
    optimizers = [torch.optim.SGD([item for _, item in named[first::2]], lr=0.1, momentum=0.9) for first in (0, 1)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()  # gradients of all steps are summed
        for optimizer in optimizers:
            optimizer.step()
    return {name: item.flatten().tolist() for name, item in model.state_dict().items()}


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4)))


@pytest.mark.parametrize("train_small", [train_by_turns, train_by_line_search])
def test_gradients_and_optimizer_state_go_along(train_small: Callable[[nn.Module], Any]) -> None:
    wanted = train_small(small())
    models = [small() for _ in range(RANKS)]

    def program(rank: int) -> Any:
        model = farspan.distribute(models[rank], plan=random_whole_plan(models[rank], 3))
        generator = random.Random(3)
        engine().after_step.append(lambda: moved.append(moved_bytes(model, random_plan(model, generator))))
        return train_small(model)

    moved: list[int | None] = []
    assert run_threads(RANKS, program) == [wanted] * RANKS
    assert any(moved)


@pytest.mark.timeout(300)
def test_same_numbers_whatever_moves_over_real_processes() -> None:
    names = ["unet"]
    found = [json.loads(each.stdout.splitlines()[-1]) for each in run_processes(RANKS, PROGRAM, names, timeout_s=240.0)]
    for differences, moved in found:
        assert differences == {name: [] for name in names}
        assert moved == found[0][1]
        assert any(moved), "nothing moved"


def test_what_is_one_memory_in_an_optimizers_state_is_known_to_be() -> None:
    x, sparse = torch.zeros(4), torch.eye(2).to_sparse()
    assert _memory_of(x) == _memory_of(x.view(2, 2)) == _memory_of(x.detach())
    assert _memory_of(x) != _memory_of(torch.zeros(4))
    assert _memory_of(sparse) == id(sparse)
    empty, other = torch.zeros(0), torch.zeros(0)
    assert _memory_of(empty) != _memory_of(other)

"""Several stages of which one at least is split: each runs the modules that lie on it, and those only."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.models import GPT
from tests.support.ranks import run_processes, run_threads
from tests.wide.test_loops import largest_difference, same
from torch import Tensor, nn

import farspan
from farspan.execute.process.world import current_engine
from farspan.graph import SliceName, Value, whole_name
from farspan.plan import resolve
from farspan.profile import tied

WORDS = torch.randint(17, (2, 6), generator=torch.Generator().manual_seed(1))


class Shared(GPT):
    """The first block runs again behind the last one, and its MLP within the third."""

    def forward(self, ids: Tensor) -> Tensor:
        blocks: Any = self.blocks
        x = self.embed(ids) + self.position[:, : ids.shape[1]]
        for number in (0, 1, 2, 0):
            x = blocks[number](x)
            x = x + blocks[0].mlp(x) if number == 2 else x
        return self.head(self.norm(x))


class Writing(GPT):
    """What comes from another stage is written in place, and so is a view of it."""

    def forward(self, ids: Tensor) -> Tensor:
        x: Any = self.embed(ids) + self.position[:, : ids.shape[1]]
        for block in self.blocks:
            y = block(x)
            first = y[:, 0]
            first *= 0.5
            y.view(-1, y.shape[-1]).mul_(0.9)
            y += x
            x = y * 0.5
        return self.head(self.norm(x))


class Inner(nn.Module):
    """A block in whose forward a module of another stage is called, between operations of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.far = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(self.norm(self.far(x.square() + x)) + x)))


class Nested(GPT):
    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.blocks = nn.ModuleList([Inner(), Inner()])


class Batched(nn.Module):
    """Batch norms take what comes from another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.BatchNorm1d(8), nn.Conv1d(8, 8, 3, padding=1)) for _ in range(4)])
        self.head = nn.Linear(8, 17)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        for block in self.blocks:
            x = x + block(F.relu(x))
        return self.head(x.transpose(1, 2))


def loss_of(model: Any, number: int) -> Tensor:
    ids = (WORDS + number) % 17
    return F.cross_entropy(model(ids).view(-1, 17), ids.roll(-1, 1).view(-1))


def strangers(model: nn.Module) -> set[str]:
    """Returns the parameters of which what is recorded is used by a rank that does not have them in the plan."""
    engine, plan = current_engine(), farspan.plan_of(model)
    assert engine is not None
    parameters, aliases = tied(model)
    found = resolve(
        plan,
        parameters=parameters,
        aliases=aliases,
        modules=[name for name, _ in model.named_modules()],
        world_size=engine.num_ranks,
    )
    known: set[str] = set()
    for graph in engine.recorder.pending:
        for call in graph.calls:
            named = [item for item in call.arguments or () if isinstance(item, Value) and item.name]
            ranks = {worker.rank for worker in engine.teams[call.stage].members}
            for name in [whole_name(item.name) for item in named if type(item.name) in (str, SliceName)]:
                if name in found.owner and not ranks <= set(plan.ranks_of(found.owner[name])):
                    known.add(name)
    return known


def train(model: Any, look: Any = None) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        losses = [loss_of(model, number) / 2 for number in range(2)]
        for loss in losses:
            loss.backward()
        if look is not None and step < 2:
            look()
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        found += [loss.item() for loss in losses]
    return found, {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def run(make: Any, num_ranks: int, options: dict[str, Any]) -> tuple[list[Any], set[str]]:
    """Returns what each rank finds, and the parameters that run elsewhere than planned."""
    away = set[str]()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make().double()
    wanted = train(copy.deepcopy(model))
    models = [copy.deepcopy(model) for _ in range(num_ranks)]

    def on_rank(rank: int) -> Any:
        model = farspan.distribute(models[rank], **options)
        return train(model, lambda: away.update(strangers(model)))

    found = run_threads(num_ranks, on_rank)
    assert all(same(item, found[0]) for item in found), "all ranks see the same"
    assert largest_difference(found[0], wanted) < 1e-9
    return found, away


def parts_on(places: str, *names: str, others: str = "rank:0&rank:1") -> dict[str, Any]:
    return {"plan": {"*": others, **dict.fromkeys(names, places)}}


@pytest.mark.parametrize(("num_ranks", "is_run_again"), [(4, True), (6, False), (6, True)])
def test_each_stage_runs_the_modules_that_lie_on_it(num_ranks: int, is_run_again: bool) -> None:
    make, options = functools.partial(GPT, blocks=3), {"tensor_parallel": 2}
    found, away = run(make, num_ranks, options)
    assert not away
    assert not is_run_again or same(run(make, num_ranks, options)[0], found), "to the last bit"


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (3, parts_on("rank:2", "blocks.1", "head")),
        (3, parts_on("rank:2", "embed", "position", "blocks.0")),
        (5, parts_on("rank:2&rank:3&rank:4", "blocks.1", "head")),
        (4, parts_on("rank:2+rank:3", "blocks.1")),
        (2, parts_on("rank:1&rank:0", "blocks.1")),
        (2, parts_on("rank:0", "blocks.1")),
    ],
    ids=["2, 1", "1, 2", "2, 3", "2, wide, 2", "2, others of the same", "2, 1 of them, 2"],
)
def test_stages_of_other_widths(num_ranks: int, options: dict[str, Any]) -> None:
    _, away = run(functools.partial(GPT, blocks=3), num_ranks, options)
    assert not away


TWO = parts_on("rank:2&rank:3", "blocks.1", "head")
FAR = parts_on("rank:2&rank:3", "blocks.0.far", "blocks.1.norm")
ONE = parts_on("rank:2", "blocks.0.far", "blocks.1.norm")
INTO = parts_on("rank:0&rank:1", "blocks.0.far", "blocks.1.norm", others="rank:2")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (functools.partial(GPT, blocks=2, tied=True), {"tensor_parallel": 2}),
        (Shared, {"tensor_parallel": 2}),
        (functools.partial(Writing, blocks=2), TWO),
        (Nested, FAR),
        (Nested, ONE),
        (Nested, INTO),
        (Batched, TWO),
        (functools.partial(GPT, blocks=2), {"tensor_parallel": 2, "remat": True}),
        (functools.partial(GPT, blocks=2), {"tensor_parallel": {"degree": 2, "blocks.?.mlp.2": "column"}}),
    ],
    ids=["tied", "shared", "written", "far", "one", "into", "batch_norm", "remat", "asked"],
)
def test_whatever_lies_on_several_stages(make: Any, options: dict[str, Any]) -> None:
    """Tied weights, a module that two stages share, writes into what comes from elsewhere, a module in the forward of
    another one, batch norms, remat, parts that go from one stage to the next."""
    _, away = run(make, 3 if options in (ONE, INTO) else 4, options)
    is_tied = "head.weight" not in dict(make().named_parameters())
    assert away <= ({"embed.weight"} if is_tied else set())


def test_groups_of_stages_of_ranks() -> None:
    for process in run_processes(8, Path(__file__).parent / "train_in_groups.py"):
        assert process.code == 0, process.stderr
        assert float(process.stdout.rpartition("off by ")[2].split()[0]) < 1e-9

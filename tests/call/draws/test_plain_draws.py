"""Dropout masks and noise inside the model are those of the plain program, and generators end where its own do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.call.draws import drawing_program
from tests.promises.test_randomness import MODELS, Block, Reentrant, Stack, build, case, plans, shuffled
from tests.support.parity import History, train, train_distributed
from tests.support.ranks import run_processes, run_threads
from torch import Tensor, nn
from torch.distributions import Beta, Dirichlet
from torch.utils.checkpoint import checkpoint

import farspan
from farspan.call.draws.scope import active
from farspan.errors import RecordError


class Odd(Block):
    """Few normal numbers at a time: torch keeps the second of each pair, across other draws."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + torch.randn(3).sum() * 0.1
        x = self.drop(x) + 0.1 * x.new_empty(1).normal_()
        return self.b(x) + torch.empty(5).log_normal_().mean()


class ByData(Block):
    """How many numbers are drawn depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.rrelu(self.a(x), training=True)
        weights = Dirichlet(F.softplus(self.b(x)) + 0.1).rsample()
        return self.drop(x) * weights * Beta(torch.tensor(0.5), torch.tensor(0.7)).sample()


class Chosen(Block):
    """How many rows dropout draws for depends on data; what comes out has one shape."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        rows = x[x.mean(-1) > 0]
        return self.b(x + self.drop(rows).sum(0))


class Gamma(Block):
    """Drawn of recorded values in a container, of plain ones, and inside a leaf."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch._standard_gamma(torch.exp(self.a(x)))) + torch.poisson(torch.full((8,), 3.0))


class Decides(Block):
    """What it draws decides what it does."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(1).item() < 0.5:
            return x + self.drop(self.a(x))
        return x + self.drop(self.drop(self.b(self.a(x))))


class Seeds(Block):
    """Seeds itself, and leaves it so."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return self.b(self.drop(self.a(x)))


class Forks(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            noise = torch.randn(8)
        return self.b(self.drop(self.a(x)) + noise) + torch.rand(8, generator=torch.Generator().manual_seed(5))


class Reads(Block):
    """A shape that depends on data, and masks before and after it."""

    def forward(self, x: Tensor) -> Tensor:
        kept = self.drop(self.a(x)).flatten(0, 1)
        kept = kept[kept.sum(1) > 0]
        return self.b(x) + self.drop(kept).sum() * 0.01


class Repeats(Stack):
    """Checkpoints, and modules called twice."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
            x = F.dropout(x, 0.1)
        return self.head(x)


def in_order() -> nn.Module:
    model: Any = Reentrant()
    model.order = (0, 1, 2)  # it adds up the gradients of a module's two calls in another order
    return model


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "odd": lambda: Stack(Odd),
    "by data": lambda: Stack(ByData),
    "chosen": lambda: Stack(Chosen),
    "gamma": lambda: Stack(Gamma),
    "decides": lambda: Stack(Decides),
    "seeds": lambda: Stack(Seeds),
    "forks": lambda: Stack(Forks),
    "reads": lambda: Stack(Reads),
    "repeats": Repeats,
    "reentrant": in_order,
    "shuffled": shuffled,
}
ALL = {**MODELS, **OTHERS}


def plainly(make: Callable[[], nn.Module]) -> tuple[History, Tensor]:
    torch.manual_seed(7)
    return train(build(make), case(make)), torch.get_rng_state()


@pytest.mark.parametrize("name", ALL)
def test_a_model_draws_what_it_draws_in_the_plain_program(name: str) -> None:
    make = ALL[name]
    wanted, end = plainly(make)
    for num_ranks, plan_name in ((1, "auto"), (2, "whole"), (3, "dealt")):
        plan = plans(make(), num_ranks)[plan_name]
        models = [build(make) for _ in range(num_ranks)]
        torch.manual_seed(7)

        def program(rank: int) -> tuple[History, Tensor]:
            history = train_distributed(models[rank], case(make), plan)  # noqa: B023
            return history, torch.get_rng_state()

        for rank, (history, state) in enumerate(run_threads(num_ranks, program)):
            where = f"{num_ranks} ranks, plan {plan_name}, rank {rank}"
            assert history.differences(wanted) == [], where
            assert torch.equal(state, end), where


@functools.cache
def printed_plainly() -> str:
    (alone,) = run_processes(1, drawing_program.__file__, ["plainly"])
    assert alone.code == 0, alone.stderr
    return alone.stdout.splitlines()[-1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_program_that_draws_itself_finds_its_generators_where_they_would_be(num_ranks: int) -> None:
    """Python's, numpy's and torch's; in the loop, in containers, inside leaves; seeded, saved and put back."""
    for process in run_processes(num_ranks, drawing_program.__file__):
        assert process.code == 0, process.stderr
        assert process.stdout.splitlines()[-1] == printed_plainly()


class DrawsLate(Block):
    """Draws only once its data are large, by a name that its code does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        noise: Any = getattr(torch, "rand")  # noqa: B009
        return self.b(self.a(x) + (noise(1) if x.abs().max().item() > 50 else 0.0))


def test_a_module_that_begins_to_draw_for_its_data_is_told_so() -> None:
    def program(rank: int) -> None:
        model = farspan.distribute(models[rank], plan={"0": 0, "1": 1})
        for size in (1.0, 1.0, 1.0, 100.0):
            model(torch.ones(2, 8) * size).sum().backward()
            farspan.flush()

    models = [build(lambda: nn.Sequential(DrawsLate(), nn.Linear(8, 8))) for _ in range(2)]
    with pytest.raises(RecordError, match="has drawn random numbers, and had drawn none before"):
        run_threads(2, program)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.rand(1)


class DrawsInBackward(Block):
    def forward(self, x: Tensor) -> Tensor:
        return InBackward.apply(self.a(x))


def test_who_draws_in_a_backward_is_told_so() -> None:
    models = [nn.Sequential(DrawsInBackward(), nn.Linear(8, 2)) for _ in range(2)]

    def step(seed: int | None) -> None:
        model = farspan.distribute(models.pop(), seed=seed)
        model(torch.ones(2, 8)).sum().backward()
        farspan.flush()

    with pytest.raises(RecordError, match="draws random numbers"):
        run_threads(1, lambda rank: step(None))
    before = torch.get_rng_state()
    run_threads(1, lambda rank: step(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_who_uses_the_generator_unseen_is_told_so() -> None:
    model = build(Stack)

    def program(rank: int) -> None:
        farspan.distribute(model)
        loss = model(torch.ones(2, 4, 8)).sum()
        torch.default_generator.manual_seed(3)
        loss.backward()
        farspan.flush()

    with pytest.raises(RecordError, match="where farspan does not see it"):
        run_threads(1, program)


def test_a_state_may_be_read_and_put_back_by_one_rank_alone() -> None:
    models = [build(Stack) for _ in range(2)]

    def program(rank: int) -> Tensor:
        model = farspan.distribute(models[rank])
        model(torch.ones(2, 4, 8))
        if rank == 0:
            with torch.random.fork_rng():
                torch.rand(3)
        before = active.recorder.draws.generator.get_state()  # what ranks compare when they flush
        farspan.flush()
        return before

    one, other = run_threads(2, program)
    assert torch.equal(one, other)

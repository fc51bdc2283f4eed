"""Objects that a module holds and moves on in its forward: once for each call, on every rank, whatever is predicted."""

from __future__ import annotations

import array
import collections
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.plainly import assert_same_as_plainly, train
from torch import Tensor, nn


class Ticker:
    def __init__(self) -> None:
        self.n = 0

    def tick(self) -> int:
        self.n += 1
        return self.n


def _written(buffer: Any) -> int:
    buffer[0] += 1
    return buffer[0]


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "count": (itertools.count, next),
    "cycle of an iterator": (lambda: itertools.cycle(iter([1, 5, 2])), next),
    "list iterator": (lambda: iter([0.5 * n for n in range(99)]), next),
    "iterators in iterators": (lambda: enumerate(zip(range(99), range(99), strict=True)), lambda held: next(held)[0]),
    "in a list in a dictionary": (lambda: {"k": [itertools.count()]}, lambda held: next(held["k"][0])),
    "random.Random": (lambda: random.Random(3), lambda held: held.random()),
    "numpy's generator": (lambda: np.random.default_rng(3), lambda held: held.random()),
    "numpy's old generator": (lambda: np.random.RandomState(3), lambda held: held.rand()),
    "bytes": (lambda: bytearray(2), _written),
    "array": (lambda: array.array("i", [0]), _written),
    "deque": (lambda: collections.deque([1, 2, 3]), lambda held: held.rotate(1) or held[0]),
    "Counter": (collections.Counter, lambda held: held.update("n") or held["n"]),
    "bound method": (lambda: Ticker().tick, lambda held: held()),
    "partial function": (lambda: functools.partial(Ticker.tick, Ticker()), lambda held: held()),
}


class Part(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.held = HELD[kind][0]()
        self.move = kind

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * (1 + 0.1 * HELD[self.move][1](self.held))


class Model(nn.Module):
    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.part = part()
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(torch.tanh(self.first(x))))


def plan_of(num_ranks: int, *names: str) -> dict[str, str]:
    return {name: f"rank:{number % num_ranks}" for number, name in enumerate(names)}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", HELD)
def test_moved_on_once_for_each_call(kind: str, num_ranks: int) -> None:
    plan = plan_of(num_ranks, "first", "part", "head")
    assert_same_as_plainly(lambda: Model(lambda: Part(kind)), train, num_ranks, plan=plan)


class Schedule(nn.Module):
    """A Python generator, which nothing can copy: each program makes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.rates: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * (1 + next(self.rates))


class Renewed(Schedule):
    """Sets a new iterator in its forward, and goes on with it in the next ones."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.num_calls % 3 == 0:
            self.rates = iter([0.1, 0.2, 0.3])
        self.num_calls += 1
        return super().forward(x)


class Measured(Schedule):
    """Needs data, and so a real run, to be known."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * (1 + x.mean().item() + next(self.rates))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("part", [Schedule, Renewed, Measured])
def test_generator_that_cannot_be_copied(part: type[Schedule], num_ranks: int) -> None:
    def program(model: Any) -> Any:
        model.part.rates = (0.1 * n for n in range(99))
        return train(model), None if part is Renewed else next(model.part.rates)

    assert_same_as_plainly(lambda: Model(part), program, num_ranks, plan=plan_of(num_ranks, "first", "part", "head"))


class Shared(nn.Module):
    """One counter for two modules and the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.count = itertools.count()
        self.one, self.other = Counted(self.count), Counted(self.count)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.other(self.one(x)))


class Counted(nn.Module):
    def __init__(self, count: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * (1 + 0.1 * next(self.count))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_counter_shared_by_modules_and_the_loop(num_ranks: int) -> None:
    def program(model: Any) -> Any:
        return train(model), next(model.count)

    assert_same_as_plainly(Shared, program, num_ranks, plan=plan_of(num_ranks, "one", "other", "head"))

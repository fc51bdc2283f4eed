"""What modules keep in Python objects of their own, or share with others: counted once, seen everywhere."""

from __future__ import annotations

import dataclasses
import logging
import types
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.plainly import assert_same_as_plainly, train
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.state: Any = self.new()

    def new(self) -> Any:
        return types.SimpleNamespace(n=0)

    def count(self, x: Tensor) -> None:
        self.state.n += 1

    def counted(self) -> Any:
        return self.state.n

    def forward(self, x: Tensor) -> Tensor:
        self.count(x)
        return torch.tanh(self.linear(x)) * (1 + 0.1 * self.counted())


@dataclasses.dataclass
class Statistics:
    n: int = 0
    table: dict[str, Any] = dataclasses.field(default_factory=dict)
    log: Any = None


class InDataclass(Counts):
    """An object that holds a logger and a function as well."""

    def new(self) -> Any:
        return Statistics(table={"step": abs}, log=logging.getLogger("test"))

    def count(self, x: Tensor) -> None:
        self.state.n += 1
        self.state.table["last"] = self.state.n


class Slotted:
    __slots__ = ("inner", "n")

    def __init__(self) -> None:
        self.n, self.inner = 0, [{"n": (Statistics(),)}]


class Deep(Counts):
    def new(self) -> Any:
        return Slotted()

    def count(self, x: Tensor) -> None:
        self.state.inner[0]["n"][0].n += 1

    def counted(self) -> Any:
        return self.state.inner[0]["n"][0].n


class InDeque(Counts):
    def new(self) -> Any:
        return deque(maxlen=3)

    def count(self, x: Tensor) -> None:
        self.state.append(len(self.state))

    def counted(self) -> Any:
        return sum(self.state)


class InCounter(Counts):
    def new(self) -> Any:
        return Counter()

    def count(self, x: Tensor) -> None:
        self.state.update(["n", "m"])

    def counted(self) -> Any:
        return self.state["n"]


class InArray(Counts):
    def new(self) -> Any:
        return np.zeros(2)

    def count(self, x: Tensor) -> None:
        self.state += 1

    def counted(self) -> Any:
        return float(self.state[0])


class KeepsTensors(Counts):
    def new(self) -> Any:
        return {"seen": []}

    def count(self, x: Tensor) -> None:
        self.state["seen"] = [*self.state["seen"], x.detach().mean()][-2:]

    def counted(self) -> Any:
        return sum(self.state["seen"])


class InPlainTensor(Counts):
    """Neither a parameter nor a buffer."""

    def new(self) -> Any:
        return {"mean": torch.zeros(8)}

    def count(self, x: Tensor) -> None:
        self.state["mean"].mul_(0.9).add_(x.detach().mean(0))

    def counted(self) -> Any:
        return self.state["mean"].mean()


class ByData(Counts):
    def count(self, x: Tensor) -> None:
        self.state.n += 1 if x.sum().item() > 0 else 2


class Two(nn.Module):
    def __init__(self, part: Callable[[], Counts]) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = nn.Linear(8, 8), part(), part(), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(torch.tanh(self.first(x)))
        return self.last(self.b(y + self.a.counted())) * self.b.counted()


class OneForAll(Two):
    """One object, which the root and both parts have."""

    def __init__(self, part: Callable[[], Counts]) -> None:
        super().__init__(part)
        self.state = self.b.state = self.a.state


class Reads(Counts):
    def count(self, x: Tensor) -> None: ...


class RootCounts(OneForAll):
    """What the root changes its parts only read: each call reads what it was when the program made the call."""

    def forward(self, x: Tensor) -> Tensor:
        self.state.n += 1
        y = self.a(torch.tanh(self.first(x)))
        self.state.n += 1
        return self.last(self.b(y))


def plan_of(num_ranks: int) -> dict[str, str]:
    return {name: f"rank:{i * num_ranks // 4}" for i, name in enumerate(("first", "a", "b", "last"))}


def trained(model: Any) -> Any:
    result = train(model)
    counted = [part.counted() for part in (model.a, model.b)]
    return result, [item.item() if isinstance(item, Tensor) else item for item in counted]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "part", [Counts, InDataclass, Deep, InDeque, InCounter, InArray, KeepsTensors, InPlainTensor, ByData]
)
def test_a_run_on_fakes_leaves_no_trace_and_a_real_one_is_seen_everywhere(
    part: Callable[[], Counts], num_ranks: int
) -> None:
    assert_same_as_plainly(lambda: Two(part), trained, num_ranks, plan=plan_of(num_ranks))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("model", "part"),
    [(OneForAll, Counts), (OneForAll, Deep), (OneForAll, KeepsTensors), (RootCounts, Reads)],
)
def test_an_object_that_several_share(
    model: Callable[..., nn.Module], part: Callable[[], Counts], num_ranks: int
) -> None:
    assert_same_as_plainly(lambda: model(part), trained, num_ranks, plan=plan_of(num_ranks))


TABLE = {"n": 0}
NUMBER = 0


def count_globally() -> None:
    TABLE["n"] += 1


class InTable(Counts):
    def count(self, x: Tensor) -> None:
        count_globally()

    def counted(self) -> Any:
        return TABLE["n"]


class InGlobal(Counts):
    def count(self, x: Tensor) -> None:
        global NUMBER
        NUMBER += 1

    def counted(self) -> Any:
        return NUMBER


class InClass(Counts):
    total = 0

    def count(self, x: Tensor) -> None:
        type(self).total += 1

    def counted(self) -> Any:
        return self.total


def in_closure() -> Counts:
    n = 0

    class InClosure(Counts):
        def count(self, x: Tensor) -> None:
            nonlocal n
            n += 1

        def counted(self) -> Any:
            return n

    return InClosure()


@pytest.mark.parametrize("part", [InTable, InGlobal, InClass, in_closure])
def test_what_a_module_changes_around_its_code_is_changed_once(
    part: Callable[[], Counts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank: ranks that are threads would share it."""
    results: list[Any] = []
    for is_plain in (True, False):
        monkeypatch.setitem(globals(), "NUMBER", 0)
        monkeypatch.setitem(TABLE, "n", 0)
        monkeypatch.setattr(InClass, "total", 0)
        torch.manual_seed(0)
        model = Two(part)
        results.append(trained(model) if is_plain else run_threads(1, partial(distributed, model))[0])
    assert results[0] == results[1]


def distributed(model: nn.Module, rank: int) -> Any:
    return trained(farspan.distribute(model, plan=plan_of(1)))

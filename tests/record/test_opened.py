"""Modules that the plan places as a whole, and that name a place inside: they are opened."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.places import Named, engine, ranks, same_with_places
from tests.support.plainly import X, train
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import FarspanError, RecordError


class Moves(Named):
    """Would run as one unit, but for the places in its forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "on":
            with self.on(0):
                y = torch.tanh(self.a(x))
        else:
            y = torch.tanh(self.moved(self.a(x), 0))
        assert self.is_at(y, 0)
        return self.b(y)


class Outer(Named):
    """Two modules that the plan places as a whole, one below another, with a place inside."""

    def __init__(self, how: str = "to") -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), Moves(how), nn.Dropout(0.0))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        middle: Any = self.inner[1]
        middle.places = self.places
        y = self.inner(self.moved(x, 0))  # of a plain tensor
        return self.head(self.moved(self.moved(y, 0), 1)) * 2


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("how", ["on", "to"])
def test_a_module_that_names_a_place_is_opened(how: str, num_ranks: int) -> None:
    plan = {"inner": "rank:0", "head": f"rank:{num_ranks - 1}"} | ({"inner.0": "rank:1"} if num_ranks == 3 else {})

    def program(model: Any) -> Any:
        seen: list[str] = []
        model.inner[1].register_forward_hook(lambda module, args, output: seen.append("hook"))
        result = train(model)
        if model.places:
            leaves = engine().recorder.leaves
            assert leaves[id(model.inner[1])].is_open and not leaves[id(model.inner[1].a)].is_open
        return result, seen

    same_with_places(lambda: Outer(how), program, num_ranks, ranks(num_ranks, 1, 0), plan=plan)


class Late(Named):
    """Its place comes after what fakes cannot tell: a real run shows it, on the owner alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(8, 8)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.sum().item())
        if self.seen[-1] > -1e9:
            x = self.linear(x)
            if self.how == "to":
                x = self.moved(x, 0)
            else:
                with self.on(0):
                    x = torch.tanh(x)
            assert self.is_at(x, 0)
        return x + self.linear(x)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("how", ["on", "to"])
def test_a_module_that_names_a_place_after_reading_data_is_opened(how: str, num_ranks: int) -> None:
    class Model(Named):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.late, self.head = nn.Linear(8, 8), Late(how), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            self.late.places = self.places
            return self.head(self.late(self.first(x)))

    places = ranks(num_ranks, 0, 1, 2)
    plan = {"first": places[0], "late": places[1], "head": places[2]}
    same_with_places(Model, lambda model: (train(model), model.late.seen), num_ranks, (places[0] + "/cpu",), plan=plan)


class Fickle(nn.Module):
    """Names a place only where it is late: after its run on fakes, or after it has counted."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        if (type(x) is Tensor) if self.how == "not on fakes" else (x.sum().item() < 1e9):
            with farspan.on("rank:0"):
                x = x + 1
        return x


def test_a_place_that_is_named_after_the_data_have_been_read_opens_the_module() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Fickle("counts first"))

    def program(model: nn.Module) -> tuple[float, int]:
        loss = model(X).square().mean()
        loss.backward()
        return loss.item(), int(model[1].norm.num_batches_tracked)  # type: ignore[index]

    models = [copy.deepcopy(model) for _ in range(2)]
    farspan.distribute(model)
    wanted = program(model)
    plan = {"0": "rank:0", "1": "rank:1"}
    assert run_threads(2, lambda rank: program(farspan.distribute(models[rank], plan=plan))) == [wanted, wanted]


def test_a_place_that_comes_too_late_is_a_named_error() -> None:
    models = [nn.Sequential(nn.Linear(8, 8), Fickle("not on fakes")) for _ in range(2)]

    def program(rank: int) -> None:
        farspan.distribute(models[rank], plan={"0": "rank:0", "1": "rank:1"})(X)
        farspan.flush()

    with pytest.raises(FarspanError, match="inside a module that runs as one unit"):
        run_threads(2, program)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to("rank:0")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def test_a_place_in_an_autograd_function_is_a_named_error() -> None:
    models = [nn.Linear(8, 5) for _ in range(1)]
    with pytest.raises(RecordError, match=r"Function\.apply cannot run as one call: .* moves a tensor"):
        run_threads(1, lambda rank: Function.apply(farspan.distribute(models[rank])(X)))

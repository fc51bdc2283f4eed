"""Modules that do more than return, computed again in the backward: nothing happens twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.promises.test_randomness import STEPS
from tests.remat.test_remat import Part, Parts, assert_same
from tests.support.loop import on_ranks
from tests.support.plainly import SEQUENCES, X, Y
from tests.support.plainly import train as train_twice
from tests.support.ranks import run_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farspan
from farspan.errors import RecordError


def gradients(model: nn.Module) -> list[Any]:
    return [None if item.grad is None else item.grad.tolist() for item in model.parameters()]


# Modules that do more than return.


class Effects(nn.Module):
    """Writes into what it is given, keeps a loss, appends to a list, writes a plain attribute in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[int] = []
        self.aux: Any = 0.0

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        y = torch.tanh(self.linear(x))
        if cache:
            y = y + cache[-1] * len(cache)
        cache.append(y)
        self.seen.append(len(cache))
        self.aux = y.square().mean() * len(self.seen)
        return y.exp()


class WithEffects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Effects() for _ in range(4)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        for part in self.parts:
            x = part(x, cache)
        parts: Any = self.parts
        return self.head(x) + sum(part.aux for part in parts) + cache[1].mean()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        y = self.linear(x)
        y += 1
        self.relu(y)
        return self.relu(torch.sigmoid(y) - 0.4).square()


class WithInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.parts = nn.ModuleList([InPlace() for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x * 1.5).add_(1)
        return self.head(x)


class InCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for number, part in enumerate(self.parts):
            x = checkpoint(part, x, use_reentrant=number == 1)  # type: ignore[assignment]
        return self.head(x)


class Autocast(Parts):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.second(self.first(x))
        return self.head(x.float())


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(2)])
        self.head = nn.Linear(8, 5)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x * torch.rand(8, generator=self.generator))
        return self.head(x)

    def __deepcopy__(self, memo: Any) -> OwnGenerator:
        same = OwnGenerator()
        same.load_state_dict(self.state_dict())
        return same


class InnerGradient(nn.Module):
    """Differentiates inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(2)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(part(inner).sum(), inner, create_graph=True)
            x = part(x) + slope
        return self.head(x)


class WritesItsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) * self.scale)
        self.scale.data.mul_(1.1)
        return self.head(y.exp())


class MeanByData(nn.Module):
    """Writes into what it keeps through `.data`, which torch does not count as a write."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head, self.means = nn.Linear(8, 8), nn.Linear(8, 5), [torch.zeros(8)]

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.means[0].data.lerp_(y.data.mean((0, 1)), 0.5)
        return self.head(y - self.means[0])


class HalvesByData(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(0.5)
        return torch.tanh(super().forward(x))


class ArgumentByData(nn.Sequential):
    """A part writes so into what it is given."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), HalvesByData(8, 8), nn.Linear(8, 5))


SEVERAL = [
    WithEffects,
    WithInPlace,
    InCheckpoint,
    Autocast,
    OwnGenerator,
    InnerGradient,
    WritesItsParameter,
    MeanByData,
]


@pytest.mark.parametrize(
    ("make", "remat", "num_ranks"), list(itertools.product(SEVERAL, [True, ["*"], ["*.*"]], [1, 2]))
)
def test_modules_that_do_more_than_return(make: Any, remat: Any, num_ranks: int) -> None:
    if remat == ["*.*"] and not hasattr(make(), "parts"):
        remat = ["head"]
    options: dict[str, Any] = {"remat": remat}
    assert_same(make, train_twice, num_ranks, **options)


@pytest.mark.parametrize("remat", [True, ["1"]])
def test_a_unit_that_writes_its_argument_by_data_is_not_computed_again(remat: Any) -> None:
    assert_same(ArgumentByData, train_twice, 2, remat=remat)


def test_recurrent_networks() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)
            self.head = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    for remat in (True, ["lstm"]):
        for num_ranks in (1, 2):
            assert_same(Net, lambda model: train_twice(model, SEQUENCES), num_ranks, remat=remat)


def test_a_saved_tensor_that_is_written_into_is_an_error_as_in_torch() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).exp()
            z = y * 1
            y.add_(1)
            return z + y.sigmoid()

    for remat in (False, True, [""]):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            on_ranks(1, lambda model: train_twice(farspan.distribute(model, remat=remat)), Wrong)  # noqa: B023


def test_an_input_that_is_written_into_before_it_is_read_again_is_an_error() -> None:
    """The module, which has not saved it, was computed again from the new numbers: other gradients, silently."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.part = nn.Linear(8, 5), Part()
            self.part.inner = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            z = self.part(y)
            y.add_(1)
            return z + y

    on_ranks(1, lambda model: train_twice(farspan.distribute(model)), Written)
    with pytest.raises(RecordError, match="an input of Part has been written to"):
        on_ranks(1, lambda model: train_twice(farspan.distribute(model, remat=["part"])), Written)


def test_frozen_parts_and_several_models() -> None:
    def program(rank: int) -> Any:
        torch.manual_seed(0)
        one, two = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
        one.requires_grad_(False)
        farspan.distribute(one, remat=True)
        farspan.distribute(two, remat=["1"])
        loss = F.cross_entropy(two(one(X)), Y)
        loss.backward()
        return loss.item(), gradients(two)

    torch.manual_seed(0)
    one, two = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    loss = F.cross_entropy(two(one(X)), Y)
    loss.backward()
    assert run_threads(1, program)[0] == (loss.item(), gradients(two))


def test_an_input_that_one_rank_has_read() -> None:
    def program(model: Any) -> Any:
        found = []
        for number in range(3):
            batch = farspan.from_rank(0, {"x": X + number, "y": Y})
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            loss.backward()
            found.append(loss)
        return [loss.item() for loss in found], [parameter.grad.tolist() for parameter in model.parameters()]

    for remat in (True, ["first", "second"]):
        assert_same(Parts, program, 2, remat=remat)


def test_losses_and_outputs_can_be_read_after_the_step() -> None:
    def program(model: Any) -> Any:
        x = STEPS[0][0][0][:, 0]
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        farspan.flush()
        return out.tolist(), loss.item(), out.sum().item()

    for num_ranks in (1, 2):
        assert_same(Parts, program, num_ranks, remat=True)

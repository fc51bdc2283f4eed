"""Programs that were wrong only while their first step was measured: the same numbers on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.torch_private import poisoned


class Cells(nn.Module):
    """Two cells whose states the loop hands to the next micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.GRUCell(8, 8), nn.GRUCell(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        a = self.first(x, state[0])
        b = self.second(a, state[1])
        return self.out(b), (a, b)


def train_cells(model: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(7)
    data = [(torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)) for _ in range(3)]
    state = (torch.zeros(4, 8), torch.zeros(4, 8))
    found: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        losses = []
        for x, y in data:
            prediction, state = model(x, state)
            loss = F.mse_loss(prediction, y)
            loss.backward()
            state = (state[0].detach(), state[1].detach())
            losses.append(loss)
        optimizer.step()
        found += [loss.item() for loss in losses]
    return found


class Used(nn.Module):
    """A layer that is used twice, with others between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))
        self.layers.append(self.layers[0])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def train_used(model: Any) -> list[float]:
    """Two backwards through each micro-batch's graph."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(10)
    found: list[float] = []
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(4):
            x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)
            prediction = model(x)
            prediction.abs().mean().mul(0.1).backward(retain_graph=True)
            F.mse_loss(prediction, y).div(4).backward()
        for parameter in model.parameters():
            found += parameter.grad.flatten().tolist()
        optimizer.step()
    return found


class Tables(nn.Module):
    """Tables that become longer when a longer text comes: plain attributes, the same on every rank."""

    frequency: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", 1.0 / torch.arange(1, 9))
        self.table: Tensor | None = None

    def forward(self, length: int) -> Tensor:
        if self.table is None or self.table.shape[0] < length:
            self.table = torch.outer(torch.arange(length).float(), self.frequency).sin()
        return self.table[:length]


class Block(nn.Module):
    """A container while the first step is measured, and one module of a stage after that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.tables = nn.Linear(8, 32), nn.Linear(32, 8), Tables()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(torch.tanh(self.first(x))) * self.tables(x.shape[1])


def make_texts() -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(4)], nn.Linear(8, 8))


def train_texts(model: Any) -> list[float]:
    """Lengths that the tables have in later steps only, behind shorter ones."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(3)
    found: list[float] = []
    for step in range(3):
        optimizer.zero_grad()
        losses = []
        for length in (6, 9, 7, 11 + step):
            loss = model(torch.randn(2, length, 8, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss)
        optimizer.step()
        found += [loss.item() for loss in losses]
    return found


PROGRAMS = {
    "growing tables": (make_texts, train_texts),
    "states handed on": (Cells, train_cells),
    "two backwards": (Used, train_used),
}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_measured_programs_are_bit_equal(name: str, num_ranks: int) -> None:
    make, train = PROGRAMS[name]
    torch.manual_seed(5)
    models = [make() for _ in range(num_ranks + 1)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    plain = train(models[-1])
    assert run_threads(num_ranks, lambda rank: train(farspan.distribute(models[rank]))) == [plain] * num_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_released_numbers_are_nan(dtype: torch.dtype) -> None:
    tensor = poisoned((2, 3), dtype, "cpu")
    assert tensor.shape == (2, 3) and bool(tensor.isnan().all())
    assert tensor.untyped_storage().nbytes() == dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8])
def test_released_integers_are_far_from_zero(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    assert poisoned((2,), dtype, "cpu").tolist() == [info.min or info.max] * 2

"""Modules that change in their forward what they have registered: parameters, buffers, parts, what is trained.

One rank alone runs a module that is placed as a whole; the change belongs to the modules of every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import X, Y, assert_same_as_plainly
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import RecordError


class Codebook(nn.Module):
    """The vector quantiser of the well-known VQ-VAE notebooks: the codes are averages, set in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Tensor
        self.codes = nn.Embedding(4, 8)
        self.sums = nn.Parameter(self.codes.weight.detach().clone())
        self.register_buffer("counts", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.one_hot(torch.cdist(x, self.codes.weight).argmin(1), 4).float()
        nearest = chosen @ self.codes.weight
        if self.training:
            self.counts = self.counts * 0.9 + 0.1 * chosen.sum(0)
            self.sums = nn.Parameter(self.sums * 0.9 + 0.1 * (chosen.t() @ x))
            self.codes.weight = nn.Parameter(self.sums / self.counts.unsqueeze(1))
        return x + (nearest - x).detach() + 0.1 * nearest


class Layer(nn.Module):
    """May change something when it is called for the third time."""

    at = 3

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.scale: Tensor = nn.Parameter(torch.ones(8))
        self.offset: Tensor
        self.register_buffer("offset", torch.ones(8))
        self.num_calls = 0

    def change(self, x: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == self.at:
            self.change(x)
        x = self.norm(self.linear(x))
        x = x * self.scale
        return x + self.offset if "offset" in self._buffers or "offset" in self._parameters else x


class BufferIsTrained(Layer):
    def change(self, x: Tensor) -> None:
        self.offset = nn.Parameter(self.offset * 2)


class ParameterIsKept(Layer):
    def change(self, x: Tensor) -> None:
        scale = self.scale.detach() * 1.5
        del self.scale
        self.register_buffer("scale", scale)


class Grows(Layer):
    def change(self, x: Tensor) -> None:
        self.scale = nn.Parameter(torch.cat([self.scale[None], x.detach()[:1]]).mean(0))
        self.register_buffer("offset", torch.ones(6, 8), persistent=False)


class LosesABuffer(Layer):
    def change(self, x: Tensor) -> None:
        del self.offset


class AnotherPart(Layer):
    at = 1

    def change(self, x: Tensor) -> None:
        self.linear = nn.Sequential(nn.Linear(x.shape[1], 4), nn.Linear(4, 8))


class LosesAPart(Layer):
    def change(self, x: Tensor) -> None:
        self.norm = nn.Identity()


class Freezes(Layer):
    def change(self, x: Tensor) -> None:
        self.linear.weight.requires_grad = False
        self.norm.requires_grad_(False)


class InEvalMode(Layer):
    """Keeps its normalisation in eval mode, whatever the loop says."""

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        return super().forward(x)


class KeepsItsGraph(Layer):
    """A buffer with a history, used in the same forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.offset = torch.zeros(8)
        for row in x:
            self.offset = torch.tanh(self.linear(row) + self.offset)
        return super().forward(x)


class ByData(Layer):
    """What it changes, and draws, depends on data: no run on fakes can tell."""

    def forward(self, x: Tensor) -> Tensor:
        if F.dropout(x, 0.3, self.training).abs().mean() > 0.01:
            self.scale = nn.Parameter(self.scale.detach() * 1.1 + 0.01 * torch.randn(8))
        return super().forward(x)


class LateByData(nn.Module):
    """Nothing that Python can see tells its first calls, which change nothing, from later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls = self.num_calls + 1
        if self.num_calls > 4:
            self.scale = nn.Parameter(self.scale.detach() * 1.1)
        return x * self.scale


def built(part: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), part()), nn.Linear(8, 5))


def plan_of(num_ranks: int) -> dict[str, str]:
    return {str(number): f"rank:{min(number, num_ranks - 1)}" for number in range(3)}


def trained(model: Any) -> Any:
    """Three steps of three micro-batches, and everything that the program can see of the model."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Any] = []
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        for shift in range(3):
            loss = F.cross_entropy(model(X + 0.3 * shift), Y)
            loss.backward()
        seen.append([None if item.grad is None else item.grad.tolist() for item in model.parameters()])
        optimizer.step()
        seen.append(loss.item())
    seen.append({name: tensor.tolist() for name, tensor in model.state_dict().items()})
    seen.append([(name, item.requires_grad) for name, item in model.named_parameters()])
    seen.append([part.training for part in model.modules()])
    model.eval()
    return seen, model(X).tolist(), torch.rand(1).item()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "part",
    [
        Codebook, BufferIsTrained, ParameterIsKept, Grows, LosesABuffer, AnotherPart, LosesAPart, Freezes, InEvalMode,
        KeepsItsGraph, ByData,
    ],
)  # fmt: skip
def test_what_a_forward_registers_is_registered_on_every_rank(part: Callable[[], nn.Module], num_ranks: int) -> None:
    assert_same_as_plainly(lambda: built(part), trained, num_ranks, plan=plan_of(num_ranks))


def test_what_depends_on_data_and_comes_late_is_an_error() -> None:
    model = built(LateByData)
    models = [copy.deepcopy(model) for _ in range(2)]
    with pytest.raises(RecordError, match=r"sets a parameter \(scale\)[\s\S]*depends on the data"):
        run_threads(2, lambda rank: trained(farspan.distribute(models[rank], plan=plan_of(2))))

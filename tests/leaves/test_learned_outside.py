"""Modules use learned tensors that are not registered anywhere: every rank's program gets their whole gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan

INPUTS = torch.randn(3, 2, 6, 8, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(3, (3, 2, 6), generator=torch.Generator().manual_seed(2))
PLAN = {"0": "rank:0", "1": "rank:0", "2": "rank:1", "3": "rank:1"}


class Learned:
    """What the modules of one program share."""

    def __init__(self) -> None:
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.gate: Tensor = self.scale.sigmoid()

    def renew(self) -> None:
        self.gate = self.scale.sigmoid()


class Block(nn.Module):
    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.linear(x)).tanh()


class Listed(nn.Module):
    def __init__(self, learned: Learned) -> None:
        super().__init__()
        self.linear, self.scales = nn.Linear(8, 8), [learned.scale]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scales[0]


class Doubled(torch.autograd.Function):
    """torch sees the tensor, though no gradient is recorded inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradients[0] * scale * 2, (gradients[0] * x * 2).sum(0)


class FromData(Block):
    """Only a run can tell what it gives."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.use(y * 0.5 if float(y.detach().mean()) > 0 else y).tanh()


KINDS: dict[str, Callable[[Learned], nn.Module]] = {
    "a parameter around it": lambda learned: Block(lambda x: x * learned.scale),
    "made of one": lambda learned: Block(lambda x: x * learned.gate),
    "in a list": Listed,
    "in a function of autograd": lambda learned: Block(lambda x: Doubled.apply(x, learned.scale)),  # type: ignore[arg-type, return-value]
    "where the data decide": lambda learned: FromData(lambda x: x * learned.scale),
    "only read": lambda learned: Block(lambda x: x * learned.scale.detach()),
}


def build(kind: str) -> tuple[Learned, nn.Module]:
    torch.manual_seed(0)
    learned, make = Learned(), KINDS[kind]
    return learned, nn.Sequential(make(learned), nn.Linear(8, 8), make(learned), nn.Linear(8, 3))


def train(learned: Learned, model: nn.Module, freeze: Callable[[Tensor, bool], object] = lambda *_: None) -> Any:
    optimizer = torch.optim.SGD([*model.parameters(), learned.scale], lr=0.1)
    found: list[Any] = []
    for batches, wanted in zip(INPUTS, TARGETS, strict=True):
        optimizer.zero_grad()
        for number, (x, y) in enumerate(zip(batches, wanted, strict=True)):
            freeze(learned.scale, number == 0)
            learned.renew()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            freeze(learned.scale, number == 1)
            found.append(loss)
        found.append(None if learned.scale.grad is None else learned.scale.grad.tolist())
        optimizer.step()
    values = [item.item() if torch.is_tensor(item) else item for item in found]
    return values, learned.scale.tolist(), {name: item.tolist() for name, item in model.state_dict().items()}


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_has_the_whole_gradient(kind: str, remat: bool) -> None:
    wanted, built = train(*build(kind)), [build(kind) for _ in range(2)]

    def on_rank(rank: int) -> Any:
        learned, model = built[rank]
        return train(learned, farspan.distribute(model, plan=PLAN, remat=remat))

    assert run_threads(2, on_rank) == [wanted, wanted]


@pytest.mark.parametrize(
    "freeze",
    [
        lambda scale, is_frozen: scale.requires_grad_(not is_frozen),
        lambda scale, is_frozen: setattr(scale, "requires_grad", not is_frozen),
    ],
)
@pytest.mark.parametrize("kind", ["a parameter around it", "in a list"])
def test_it_is_frozen_for_some_batches(kind: str, freeze: Callable[[Tensor, bool], object]) -> None:
    wanted, built = train(*build(kind), freeze), [build(kind) for _ in range(2)]

    def on_rank(rank: int) -> Any:
        learned, model = built[rank]
        return train(learned, farspan.distribute(model, plan=PLAN), freeze)

    assert run_threads(2, on_rank) == [wanted, wanted]

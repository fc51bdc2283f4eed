"""A model whose modules and parameters change after it has been distributed trains on as it would in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import assert_same_as_plainly
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

_generator = torch.Generator().manual_seed(5)
BATCHES = [(torch.randn(6, 4, generator=_generator), torch.randn(6, 1, generator=_generator)) for _ in range(4)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Adapted(nn.Module):
    """A layer and what is learned beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = linear(base.in_features, 2), linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def linear(num_in: int, num_out: int) -> nn.Linear:
    layer = nn.Linear(num_in, num_out, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.linspace(-0.5, 0.5 + number, parameter.numel()).view(parameter.shape).sin())
    return layer


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """Two steps of two micro-batches."""
    optimizer = optimizer or torch.optim.Adam([each for each in model.parameters() if each.requires_grad], 0.05)
    losses = []
    for number, (x, y) in enumerate(BATCHES):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [loss.item() for loss in losses]


def outcome(model: nn.Module) -> Any:
    return {name: item.tolist() for name, item in model.state_dict().items()}, [n for n, _ in model.named_parameters()]


def another_head(model: Any) -> Any:
    losses = train(model)
    model.head = nn.Sequential(linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), linear(8, 1))
    losses += train(model)
    model.eval()
    return losses, model(BATCHES[0][0]).tolist(), outcome(copy.deepcopy(model))


def another_parameter(model: Any) -> Any:
    losses = train(model)
    model.head.weight = nn.Parameter(model.head.weight.detach() * 2)
    model.blocks[1][0].weight = nn.Parameter(torch.eye(8))
    return losses, train(model), outcome(model)


def cropped(model: Any) -> Any:
    """A parameter becomes a part of what it was, as when a shorter context is chosen."""
    losses = train(model)
    for block in model.blocks:
        block[0].weight, block[0].bias = nn.Parameter(block[0].weight[:5]), nn.Parameter(block[0].bias[:5])
        block[2].weight = nn.Parameter(block[2].weight[:, :5])
    return losses, train(model), outcome(model)


def adapters(model: Any) -> Any:
    for block in model.blocks:
        block[0] = Adapted(block[0])
    model.head = Adapted(model.head)
    return train(model), outcome(model)


def blocks_come_and_go(model: Any) -> Any:
    losses = train(model)
    model.blocks[1] = nn.Sequential(linear(8, 8), nn.GELU())
    model.blocks.insert(0, nn.Sequential(linear(8, 8), nn.BatchNorm1d(8)))
    del model.blocks[3]
    model.norm = nn.Identity()
    for block in model.blocks:
        block.append(nn.Tanh())
    return losses, train(model), outcome(model)


def in_the_middle_of_a_step(model: Any) -> Any:
    """What was recorded before the change runs with what was there."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for number, (x, y) in enumerate(BATCHES):
        losses.append(F.mse_loss(model(x), y))
        losses[-1].backward()
        if number == 1:
            model.blocks[0] = nn.Sequential(linear(8, 8), nn.Tanh())
            model.head._parameters["bias"] = nn.Parameter(torch.ones(1))
    optimizer.step()
    return [loss.item() for loss in losses], outcome(model)


def pruned(model: Any) -> Any:
    losses = train(model)
    prune.l1_unstructured(model.blocks[1][0], "weight", 0.5)
    prune.l1_unstructured(model.head, "weight", 0.3)
    losses += train(model)
    prune.remove(model.head, "weight")
    return losses, train(model), outcome(model)


def normalised(model: Any) -> Any:
    parametrizations.weight_norm(model.blocks[0][0])
    parametrizations.weight_norm(model.head)
    losses = train(model)
    parametrize.remove_parametrizations(model.head, "weight")
    return losses, train(model), outcome(model)


def registered(model: Any) -> Any:
    """A weight tied, a buffer and a parameter that nobody knew of, new values, a frozen part."""
    model.blocks[3][2].weight = model.blocks[0][0].weight
    model.head.register_buffer("offset", torch.tensor(2.0))
    model.register_parameter("gain", nn.Parameter(torch.ones(8)))
    model.embed.requires_grad_(False)
    losses = train(model)
    model.apply(lambda part: nn.init.constant_(part.weight, 0.1) if isinstance(part, nn.Linear) else None)
    return losses, train(model), outcome(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "program",
    [
        another_head, another_parameter, cropped, adapters, blocks_come_and_go, in_the_middle_of_a_step, pruned,
        normalised, registered,
    ],
    ids=lambda program: program.__name__,
)  # fmt: skip
def test_training_goes_on_with_what_is_there(program: Callable[[Any], Any], num_ranks: int) -> None:
    assert_same_as_plainly(Net, program, num_ranks)


def test_a_model_that_changes_while_it_is_measured_stays_where_it_is() -> None:
    assert_same_as_plainly(Net, lambda model: (another_parameter(model), train(model)), 2, measure=True)

"""A plain training loop, and the same program on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.models import MLP
from tests.support.ranks import run_threads
from torch import nn

import farspan

__all__ = ["X", "Y", "mlp", "on_ranks", "same_everywhere", "steps", "weights"]

X = torch.randn(6, 12, generator=torch.Generator().manual_seed(3))
Y = torch.randint(5, (6,), generator=torch.Generator().manual_seed(4))


def mlp() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MLP()


def on_ranks(num_ranks: int, program: Callable[[nn.Module], Any], build: Callable[[], nn.Module] = mlp) -> list[Any]:
    """What `program` returns for a distributed model, by rank."""
    models = [build() for _ in range(num_ranks)]
    return run_threads(num_ranks, lambda rank: program(models[rank]))


def same_everywhere(program: Callable[[nn.Module, Callable[[nn.Module], nn.Module]], Any], num_ranks: int = 3) -> None:
    """`program(model, distribute)` gives on every rank what it gives in the plain loop."""
    wanted = program(mlp(), lambda model: model)
    for rank, got in enumerate(on_ranks(num_ranks, lambda model: program(model, farspan.distribute))):
        assert got == wanted, f"rank {rank}"


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 3) -> list[float]:
    losses = []
    for _ in range(number):
        optimizer.zero_grad()
        parts = [F.cross_entropy(model(X), Y) / 2, model(X + 1).square().mean()]
        for part in parts:
            part.backward()
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    return losses


def weights(model: nn.Module) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}

"""A program on several ranks against the same program with the plain model, to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan

__all__ = ["SEQUENCES", "X", "Y", "assert_same_as_plainly", "train"]

_generator = torch.Generator().manual_seed(11)
X = torch.randn(6, 8, generator=_generator)
SEQUENCES = torch.randn(6, 4, 8, generator=_generator)
Y = torch.randint(5, (6,), generator=_generator)


def assert_same_as_plainly(
    build: Callable[[], nn.Module], program: Callable[[Any], Any], num_ranks: int, **options: Any
) -> None:
    """`program(model)` gives on every rank what it gives for a model that is not distributed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
    wanted = program(copy.deepcopy(model))
    models = [copy.deepcopy(model) for _ in range(num_ranks)]

    def on_rank(rank: int) -> Any:
        return program(farspan.distribute(models[rank], **options))

    for rank, got in enumerate(run_threads(num_ranks, on_rank)):
        assert got == wanted, f"rank {rank}"


def train(
    model: Any, inputs: Tensor = X, loss_of: Callable[[Any], Tensor] = lambda out: F.cross_entropy(out, Y)
) -> Any:
    """Two steps of four micro-batches: the losses, gradients and weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    gradients = []
    for _ in range(2):
        optimizer.zero_grad()
        for shift in range(4):
            loss = loss_of(model(inputs + shift))
            loss.backward()
        gradients.append([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, {name: tensor.tolist() for name, tensor in model.state_dict().items()}

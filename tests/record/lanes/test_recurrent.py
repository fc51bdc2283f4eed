"""RNNs over parts of a batch, and models that compute parts of themselves again."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tests.support.ranks import run_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farspan
from farspan.execute.process.world import current_engine


class _Reader(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 8, 2, batch_first=True, dropout=dropout), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class _Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(checkpoint(self.second, self.first(x).tanh(), use_reentrant=False).tanh())


def _train(model: nn.Module) -> list[Any]:
    x = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    return [None if item.grad is None else item.grad.tolist() for item in model.parameters()]


def _cut(model: nn.Module) -> list[tuple[list[Any], list[str], bool]]:
    """What each of two ranks finds, why batches have stayed whole there, and whether they have been cut."""

    def program(rank: int) -> tuple[list[Any], list[str], bool]:
        own = copy.deepcopy(model)
        farspan.distribute(own, micro_batches=4)
        found = _train(own)
        engine = current_engine()
        assert engine is not None
        batched = engine.recorder.batches.models[id(own)]
        return found, [*batched.reasons], batched.is_cut

    return run_threads(2, program)


def test_an_lstm_with_dropout_between_its_layers_is_cut() -> None:
    """Torch's rule for symbols knows nothing of that dropout; numbers are compared without it."""
    torch.manual_seed(0)
    for _, said, is_cut in _cut(_Reader(0.3)):
        assert is_cut
        assert said == []


def test_a_checkpoint_finds_no_weights_of_one_rank_alone() -> None:
    """It is run again in the backward, where nobody's data are to be met either: ranks would find different things."""
    torch.manual_seed(0)
    model = _Again()
    expected = _train(copy.deepcopy(model))
    for found, said, is_cut in _cut(model):
        assert is_cut
        assert said == []
        assert all(
            torch.allclose(torch.tensor(one), torch.tensor(two), rtol=1e-4, atol=1e-6)
            for one, two in zip(expected, found, strict=True)
        )

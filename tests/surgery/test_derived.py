"""Tensors that modules have computed from their parameters before `distribute`: the old weight_norm and its kin."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.plainly import SEQUENCES, X, train
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import RecordError


class Generator(nn.Module):
    """The old norms on linear, convolutional and recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.first = nn.utils.weight_norm(nn.Linear(8, 8))
            self.conv = nn.utils.weight_norm(nn.ConvTranspose1d(4, 4, 4, 2, 1), dim=1)
            self.rnn = nn.utils.weight_norm(nn.LSTM(16, 8), "weight_hh_l0")
        self.last = nn.utils.spectral_norm(nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(self.first(x)))
        return self.last(self.rnn(x)[0]).mean(1)


def _compute(module: Any, _: Any) -> None:
    module.weights = [module.g * module.v]


class Scaled(nn.Module):
    """A hand-written norm: its hook computes the weight, in a list, before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.v = nn.Parameter(torch.ones(5)), nn.Parameter(torch.randn(8, 5))
        self.weights = [self.g * self.v]
        self.register_forward_pre_hook(_compute)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0]


class Once(Scaled):
    """Its weight is computed when it is built and never again: plain torch gives g and v one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self._forward_pre_hooks.clear()


def _built(build: Callable[[], nn.Module], num_ranks: int) -> list[nn.Module]:
    """Equal models; plain torch can deepcopy none of them."""
    models = []
    with torch.random.fork_rng():
        for _ in range(num_ranks):
            torch.manual_seed(0)
            models.append(build())
    return models


def _assert_same_as_plainly(build: Callable[[], nn.Module], program: Callable[[Any], Any], num_ranks: int) -> None:
    plain, *models = _built(build, num_ranks + 1)
    wanted = program(plain)
    for got in run_threads(num_ranks, lambda rank: program(farspan.distribute(models[rank]))):
        assert got == wanted


def _looked_at(model: Any) -> Any:
    """The weights can be looked at before they are computed again."""
    seen = [model.first.weight.tolist(), model.first.weight.requires_grad, model.conv.weight.shape]
    return seen, train(model, SEQUENCES)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_old_norms_put_on_before_distribute(num_ranks: int) -> None:
    """SN-GAN, WaveNet, vocoders: PlanError, for the weight's graph held its parameters."""
    _assert_same_as_plainly(Generator, _looked_at, num_ranks)


def test_a_norm_written_by_hand() -> None:
    _assert_same_as_plainly(lambda: nn.Sequential(nn.Linear(8, 8), Scaled()), train, 2)


def test_a_weight_that_is_never_computed_again_is_an_error() -> None:
    models = _built(lambda: nn.Sequential(nn.Linear(8, 8), Once()), 2)
    with pytest.raises(RecordError, match=r"the gradient of 1\.weights cannot reach"):
        run_threads(2, lambda rank: train(farspan.distribute(models[rank]), X))

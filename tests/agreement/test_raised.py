"""A module raises on one rank before its data are there: that exception ends the ranks, not what follows from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.errors import DivergenceError, RemoteError


class BadScaleError(Exception):
    """What the user's own code raises."""


class Scaled(nn.Module):
    """Raises if it is to; or wherever it is tried without data."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_features, num_features)
        self.raises = False
        self.is_strict = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises:
            raise BadScaleError("of 7") from KeyError("scale")
        if self.is_strict and type(x) is not torch.Tensor:
            import os

            os.write(2, b"STRICT")
            raise TypeError("only plain tensors")
        return self.linear(x)


def build() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(Scaled(12), nn.Linear(12, 12), Scaled(12), nn.Linear(12, 5))


def train(rank: int, story: Callable[[int, nn.Sequential], object], models: list[nn.Sequential]) -> None:
    model = models[rank]
    farspan.distribute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            story(rank, model)
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()


def errors_of(num_ranks: int, story: Callable[[int, nn.Sequential], object]) -> list[BaseException]:
    models = [build() for _ in range(num_ranks)]
    found: list[BaseException] = [RuntimeError("no error")] * num_ranks

    def program(rank: int) -> None:
        try:
            train(rank, story, models)
        except Exception as error:
            found[rank] = error
            raise

    with contextlib.suppress(Exception):
        run_threads(num_ranks, program)
    return found


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_a_module_raises_on_one_rank_is_raised_there_and_named_elsewhere(at: int, num_ranks: int) -> None:
    def story(rank: int, model: nn.Sequential) -> None:
        model.train(mode=False)  # a kind of call that is not known yet
        if rank == 1:
            model[at].raises = True  # type: ignore[assignment]

    errors = errors_of(num_ranks, story)
    own = errors.pop(1)
    assert isinstance(own, BadScaleError) and isinstance(own.__cause__, KeyError)
    assert "in forward" in "".join(own.__notes__)
    for error in errors:
        assert isinstance(error, RemoteError) and error.rank == 1
        assert error.what == "rank 1 failed: BadScaleError: of 7"
        assert "the ranks' programs differ at step 1" in error.why
        assert "in forward" in error.remote_traceback and "'scale'" in error.remote_traceback


def test_where_all_ranks_have_raised_the_same_the_difference_is_shown() -> None:
    def story(rank: int, model: nn.Sequential) -> None:
        model[2].is_strict = True  # type: ignore[assignment]
        if rank == 1:
            model[1].train(mode=False)
            model[1](X)

    for error in errors_of(2, story):
        assert isinstance(error, DivergenceError), error

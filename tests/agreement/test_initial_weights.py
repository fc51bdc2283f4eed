"""Rank 0's weights are everybody's: models that the ranks have built differently train as rank 0's does alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, mlp, steps, weights
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.errors import DivergenceError


class Buffered(nn.Module):
    """Tied weights, and buffers inside of leaves and outside, of which one is not saved and one has few elements."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = nn.Linear(12, 12)
            self.norm = nn.BatchNorm1d(12)
            self.middle = nn.Linear(12, 12)
            self.middle.weight = self.first.weight
            self.last = nn.Linear(12, 5)
            self.register_buffer("shift", torch.randn(12))
            self.register_buffer("scale", torch.randn(12).bfloat16(), persistent=False)
            self.register_buffer("spread", torch.randn(1).expand(12))
            self.norm.running_mean.copy_(torch.randn(12))  # pyright: ignore[reportOptionalMemberAccess]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x)) + self.get_buffer("shift")
        return self.last(self.middle(y) * self.get_buffer("scale").float() + self.get_buffer("spread"))


def trained(model: nn.Module) -> object:
    return steps(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)), weights(model)


def perturbed(rank: int) -> nn.Module:
    """As where one rank alone has loaded a checkpoint."""
    model = mlp()
    if rank == 0:
        model.load_state_dict({name: item * 1.5 for name, item in model.state_dict().items()})
    return model


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("build", [Buffered, perturbed])
def test_what_the_ranks_build_differently_is_rank_0s(
    build: Callable[[int], nn.Module], num_ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = trained(build(0))
    models = [build(rank) for rank in range(num_ranks)]
    first = next(name for name, _ in models[0].named_parameters())
    assert run_threads(num_ranks, lambda rank: trained(farspan.distribute(models[rank]))) == [wanted] * num_ranks
    said = [line for line in capfd.readouterr().err.splitlines() if "all train on from rank 0's" in line]
    assert len(said) == 1
    assert f"{first} on rank 1" in said[0]


def test_equal_weights_are_not_sent_and_nothing_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []
    models = [Buffered(0) for _ in range(2)]

    def program(rank: int) -> None:
        from farspan.execute.process.world import current_engine

        engine = current_engine()
        assert engine is not None
        engine.values.pull = lambda *args: asked.append(str(args))  # type: ignore[method-assign,assignment]
        farspan.distribute(models[rank])

    run_threads(2, program)
    assert asked == []
    assert "rank 0's" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.double(), "float64"),
        (lambda model: next(model.parameters()).requires_grad_(False), "that is trained"),
        (lambda model: model.register_buffer("more", torch.zeros(3)), "entries"),
    ],
)
def test_models_that_differ_otherwise_are_named(change: Callable[[nn.Module], object], words: str) -> None:
    models = [mlp(), mlp()]
    change(models[1])
    with pytest.raises(DivergenceError, match=rf"(?s)different models.*{words}"):
        run_threads(2, lambda rank: farspan.distribute(models[rank]))


def test_a_checkpoint_of_rank_0_alone_is_loaded_before_the_loss_is_read() -> None:
    models = [perturbed(rank) for rank in range(2)]
    wanted = F.cross_entropy(perturbed(0)(X), Y).item()
    assert run_threads(2, lambda rank: F.cross_entropy(farspan.distribute(models[rank])(X), Y).item()) == [wanted] * 2

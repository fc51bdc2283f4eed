"""What was found out for one call in lanes is used for later ones only as far as it holds for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import RecordError

SWITCHES = {"global": False}


class Settings:
    is_centred = False


class Switched(nn.Module):
    """Rows meet once something else than an argument or a plain attribute says so."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 5)
        self.settings, self.switches = Settings(), {"own": False}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        if self.settings.is_centred or self.switches["own"] or SWITCHES["global"]:
            hidden = hidden - hidden.mean(0)
        return self.two(hidden.tanh())


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x).tanh(), self.two(y).tanh()


def _rows(number: int) -> Tensor:
    return torch.randn(number, 6, generator=torch.Generator().manual_seed(number))


def _assert_same(model: nn.Module, step: Any) -> None:
    """Assert that three steps of a loop give the same gradients in lanes as with the whole batch."""

    def gradients(own: nn.Module) -> list[Any]:
        try:
            for number in range(3):
                step(own, own, number)
            return [torch.tensor(item.grad.tolist()) for item in own.parameters() if item.grad is not None]
        finally:
            SWITCHES["global"] = False

    def program(rank: int) -> list[Any]:
        own = copy.deepcopy(model)
        farspan.distribute(own, micro_batches=4)
        return gradients(own)

    expected = gradients(copy.deepcopy(model))
    for found in run_threads(1, program):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("where", ["object", "dictionary", "global"])
def test_what_the_forward_reads_besides_its_arguments_changes_later(where: str) -> None:
    """A warm-up that ends: from then on rows meet, and the batch is whole."""

    def step(call: Any, model: Any, number: int) -> None:
        if number == 2:
            if where == "object":
                model.settings.is_centred = True
            elif where == "dictionary":
                model.switches["own"] = True
            else:
                SWITCHES["global"] = True
        call(_rows(12)).square().mean().backward()

    _assert_same(Switched(), step)


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 5)

    def forward(self, x: Tensor, targets: Tensor, is_narrow: bool) -> Tensor:
        return F.mse_loss(self.one(x), targets[:, :1] if is_narrow else targets)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_whose_count_is_not_known_is_that_of_the_whole_batch_in_later_calls_too() -> None:
    def step(call: Any, model: Any, number: int) -> None:
        call(_rows(12), _rows(12)[:, :5], number > 0).backward()

    _assert_same(Losses(), step)


def test_two_batches_of_one_size_are_of_different_sizes_later() -> None:
    """Both were cut as one batch while they were as long as each other; rows of the longer one would be lost."""

    def step(call: Any, model: Any, number: int) -> None:
        one, two = call(_rows(12), _rows(12 if number == 0 else 16))
        (one.square().mean() + two.square().mean()).backward()

    _assert_same(Towers(), step)


@pytest.mark.parametrize(
    "ask",
    [
        lambda out, loss: out.register_hook(lambda gradient: gradient * 0.5),
        lambda out, loss: out.retain_grad(),
        lambda out, loss: torch.autograd.grad(loss, out, allow_unused=True),
    ],
)
def test_the_gradient_of_a_result_that_a_loss_has_taken_in_parts_is_an_error(ask: Any) -> None:
    """The hook was called with nothing: gradient comes to the parts, and not to what they were joined to later."""
    models = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)) for _ in range(2)]

    def program(rank: int) -> None:
        model = farspan.distribute(models[rank], micro_batches=2)
        out = model(torch.ones(8, 6))
        ask(out, out.square().mean())

    with pytest.raises(RecordError, match="on a tensor of a batch that is cut, which has already been used"):
        run_threads(2, program)

"""Autograd functions whose `apply` was taken before farspan saw any call, wherever the program keeps it."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import torch
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.errors import RecordError


class Steeper(torch.autograd.Function):
    """Minus x, with three times its gradient: recorded without its backward, it would give another one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return -x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return -3 * gradient


class Holder:
    def __init__(self) -> None:
        self.function = Steeper.apply


holder = Holder()
in_a_tuple = (Steeper.apply,)
in_a_list = [Steeper.apply]
in_a_dictionary = {"function": Steeper.apply}


def in_a_cell() -> Any:
    function = Steeper.apply
    return lambda x: function(x)


closure = in_a_cell()


class Everywhere(nn.Module):
    of_the_class = Steeper.apply

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        self.of_the_module = Steeper.apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = holder.function(self.a(x)) + in_a_list[0](x) + in_a_dictionary["function"](x)
        x = closure(x) + type(self).of_the_class(x) * 2 + self.of_the_module(x) * 3  # type: ignore[operator]
        return self.b(x)


class InAPartial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        self.function = functools.partial(in_a_tuple[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.function(self.a(x)))


def gradients(model: nn.Module) -> list[list[float]]:
    model(torch.ones(2, 3)).sum().backward()
    return [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None]


PLAN = {"a": "rank:0", "b": "rank:1"}


def test_an_apply_that_was_taken_early_has_its_own_gradient() -> None:
    models = [Everywhere() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    wanted = gradients(copy.deepcopy(models[0]))
    for got in run_threads(2, lambda rank: gradients(farspan.distribute(models[rank], plan=PLAN))):
        assert got == wanted


def test_one_that_cannot_be_found_is_right_or_an_error() -> None:
    models = [InAPartial() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    wanted = gradients(copy.deepcopy(models[0]))
    found: list[Any] = [wanted, wanted]
    with contextlib.suppress(RecordError):
        found = run_threads(2, lambda rank: gradients(farspan.distribute(models[rank], plan=PLAN)))
    assert found == [wanted, wanted]

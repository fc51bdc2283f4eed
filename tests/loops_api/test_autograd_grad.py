"""`torch.autograd.grad`: of a loss with respect to parameters, and to tensors outside the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, on_ranks, same_everywhere, weights
from torch import nn

import farspan
from farspan.errors import RecordError

_Distribute = Callable[[nn.Module], nn.Module]


def _lists(tensors: Any) -> list[Any]:
    return [None if tensor is None else tensor.tolist() for tensor in tensors]


def steps_by_hand(model: nn.Module, distribute: _Distribute) -> Any:
    distribute(model)
    parameters = list(model.parameters())
    losses: list[float] = []
    for _ in range(3):
        loss = F.cross_entropy(model(X), Y)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)
        losses.append(loss.item())
    return losses, weights(model), [parameter.grad for parameter in parameters]


def what_is_in_grad_stays(model: nn.Module, distribute: _Distribute) -> Any:
    distribute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(X), Y).backward()
    parameters = list(model.parameters())
    some = torch.autograd.grad(model(X + 1).sum(), parameters[3:7:2])
    F.cross_entropy(model(X - 1), Y).backward()
    seen = _lists(some), _lists([parameter.grad for parameter in parameters])
    optimizer.step()
    return seen, weights(model)


def of_an_input(model: nn.Module, distribute: _Distribute) -> Any:
    distribute(model)
    data = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(data), Y), data)
    return gradient.tolist(), data.grad, [parameter.grad for parameter in model.parameters()]


def of_all_kinds_at_once(model: nn.Module, distribute: _Distribute) -> Any:
    distribute(model)
    data, scale, other = (
        X.clone().requires_grad_(),
        torch.ones(12, requires_grad=True),
        torch.ones(2, requires_grad=True),
    )
    first, *_, last = model.parameters()
    wanted = [last, data, scale, first, other]
    out = model(torch.tanh(data * scale))
    weighted = torch.linspace(-1, 1, out.numel()).view_as(out)
    gradients = torch.autograd.grad([out, out.sum()], wanted, [weighted, None], retain_graph=True, allow_unused=True)
    again = torch.autograd.grad(out.mean(), wanted, materialize_grads=True)
    return _lists(gradients), _lists(again)


def zeros_for_parameters_that_are_not_used(model: Any, distribute: _Distribute) -> Any:
    distribute(model)
    first, *_, last = model.parameters()
    found = torch.autograd.grad(model.head(X).sum(), [first, last], materialize_grads=True)
    kept = torch.autograd.grad(model.head(X).sum(), [first, last], materialize_grads=True, create_graph=True)
    with pytest.raises(RuntimeError, match="Tensor at index 1 appears to not have been used"):
        torch.autograd.grad(model.head(X).sum(), [last, first])
    return _lists(found), _lists(kept), kept[0].requires_grad


def a_penalty_on_the_step_taken_inside(model: nn.Module, distribute: _Distribute) -> Any:
    """Sharpness-aware: the gradient moves the weights, and the loss is taken there."""
    distribute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    for _ in range(2):
        gradients = torch.autograd.grad(F.cross_entropy(model(X), Y), parameters)
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        moves = [0.05 * gradient / (norm + 1e-12) for gradient in gradients]
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize(
    "program",
    [
        steps_by_hand,
        what_is_in_grad_stays,
        of_an_input,
        of_all_kinds_at_once,
        zeros_for_parameters_that_are_not_used,
        a_penalty_on_the_step_taken_inside,
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_gradients_are_returned(program: Any, num_ranks: int) -> None:
    same_everywhere(program, num_ranks)


def test_a_parameter_used_on_several_stages() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(12, 12, bias=False) for _ in range(3)])
            self.inner = nn.Linear(12, 12)
            self.layers.append(nn.Linear(12, 12, bias=False))
            self.layers[3].weight = self.layers[0].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x) + self.inner.weight.sum())
            return self.inner(x)

    def build() -> nn.Module:
        model = Tied()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.3, 0.3, generator=generator)
        return model

    def program(model: nn.Module) -> Any:
        return _lists(torch.autograd.grad(model(X).square().sum(), list(model.parameters())))

    wanted = program(build())
    assert on_ranks(3, lambda model: program(farspan.distribute(model)), build) == [wanted] * 3


@pytest.mark.parametrize(
    ("program", "error", "words"),
    [
        (lambda model: torch.autograd.grad(model(X).sum(), model(X)), RuntimeError, "not have been used"),
        (lambda model: torch.autograd.grad(model(X).sum(), model(X).detach()), RuntimeError, "not require grad"),
        (
            lambda model: torch.autograd.grad(model(X), model.head.weight, X[None, :, :5], is_grads_batched=True),
            RecordError,
            "is_grads_batched",
        ),
        (lambda model: torch.autograd.grad(model(X).sum(), torch.ones(1)), RuntimeError, "does not require grad"),
        (
            lambda model: torch.autograd.grad(model(X).sum(), torch.ones(1, requires_grad=True)),
            RuntimeError,
            "not have been used",
        ),
        (
            lambda model: torch.autograd.grad(model(X).detach().sum(), model.head.weight),
            RuntimeError,
            "not require grad",
        ),
    ],
)
def test_what_cannot_be_is_a_named_error(program: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        on_ranks(2, lambda model: program(farspan.distribute(model)))

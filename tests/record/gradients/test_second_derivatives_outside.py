"""Gradients with a history through what the program computes outside of the model, and hooks on what they are of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.loop import on_ranks
from torch import Tensor, nn
from torch.autograd import grad

import farspan
from farspan.errors import RecordError

DTYPE = torch.float64
POSITIONS = torch.randn(4, 3, dtype=DTYPE, generator=torch.Generator().manual_seed(1))


class Energy(nn.Module):
    """Its forward begins with operations on the plain tensor that it is given, between modules of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh, self.inner, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, positions: Tensor) -> Tensor:
        distances = (positions[:, None] - positions[None]).square().sum(-1).add(0.1).sqrt()
        return self.last(torch.tanh(self.inner(torch.tanh(self.weigh(distances))))).sum()


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Energy().to(DTYPE)


def forces(model: Any, x: Tensor, width: Tensor) -> Tensor:
    energy = model(x * width)
    (force,) = grad(energy, x, create_graph=True)
    return energy.square() + force.square().sum()


def hard_constraint(model: Any, x: Tensor, width: Tensor) -> Tensor:
    """What the model gives is multiplied by what is zero at the border: a third derivative of it."""
    u = (x.sin() * width).sum() * model(width * x.cos()) + x.square().sum()
    for power in range(1, 4):
        (slope,) = grad(u, x, create_graph=True)
        u = slope[:, 0].pow(power).sum()
    return u


def parameter_hooks(model: Any, x: Tensor, width: Tensor) -> Tensor:
    """Clipped and scaled gradients of weights."""
    handles = [parameter.register_hook(lambda gradient: gradient.tanh() * 2) for parameter in model.parameters()]
    gradients = grad(model(x) * width, list(model.parameters()), create_graph=True)
    for handle in handles:
        handle.remove()
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum()


def input_hook(model: Any, x: Tensor, width: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * width.detach() * 3)
    (slope,) = grad(model.last(torch.tanh(model.inner(x.new_ones(4, 6) * model.weigh(x @ x.new_ones(3, 4))))).sum(), x)
    h = model.weigh(x.detach() @ x.new_ones(3, 4)).detach().requires_grad_()
    h.register_hook(lambda gradient: gradient.sin())
    (inner,) = grad(model.last(torch.tanh(model.inner(h))).sum(), h, create_graph=True)
    return inner.square().sum() * slope.sum() * width


def one_behind_another(model: Any, x: Tensor, width: Tensor) -> Tensor:
    """Gradient comes to `near` from the model, and by way of what is computed of it."""
    near = x * 2
    far = model.inner(torch.cat((near * 3, near), 1)).tanh()
    gradients = grad(model.last(far).sum() + (far[:, :3] * near).sin().sum(), [near, x], create_graph=True)
    return (gradients[0] * gradients[1]).sum() * width


def train(model: Any, loss_of: Callable[[Any, Tensor, Tensor], Tensor]) -> list[Any]:
    width = torch.tensor(1.2, dtype=DTYPE, requires_grad=True)
    optimizer, found = torch.optim.Adam([*model.parameters(), width], lr=1e-2), list[Any]()
    for _ in range(2):
        x = POSITIONS.clone().requires_grad_()
        loss = loss_of(model, x, width)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [loss.item(), width.item(), None if x.grad is None else x.grad.tolist()]
    return [*found, *(parameter.tolist() for parameter in model.parameters())]


@pytest.mark.parametrize("loss_of", [forces, hard_constraint, one_behind_another, parameter_hooks, input_hook])
def test_the_same_numbers_as_in_one_process_but_for_rounding(
    loss_of: Callable[[Any, Tensor, Tensor], Tensor],
) -> None:
    wanted = train(build(), loss_of)
    for found in on_ranks(2, lambda model: train(farspan.distribute(model), loss_of), build):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def to_what_is_computed(model: Any) -> Any:
    x = POSITIONS.clone().requires_grad_()
    y = x.sin()
    return grad(model(y), y, create_graph=True)


def again_to_what_is_computed(model: Any) -> Any:
    x = POSITIONS.clone().requires_grad_()
    y = x * 2
    (slope,) = grad(y.square().sum() * model.inner.bias.sum(), x, create_graph=True)
    return grad(slope.sum(), y, create_graph=True)


def with_hooks(model: Any) -> Any:
    x = POSITIONS.clone().requires_grad_()
    x.register_hook(lambda gradient: gradient * 2)
    return grad(model(x), x, create_graph=True)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (to_what_is_computed, "not linear, to a tensor that is computed there"),
        (again_to_what_is_computed, "to a tensor that is computed there"),
        (with_hooks, "where a tensor has hooks"),
    ],
)
def test_what_cannot_be_gone_through_is_a_named_error(program: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(RecordError, match=words):
        on_ranks(2, lambda model: program(farspan.distribute(model)), build)

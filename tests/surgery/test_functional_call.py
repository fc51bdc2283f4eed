"""Calls of a model with other tensors in the place of its parameters: `functional_call`, MAML, hand-made swaps."""

# attributes of modules are a Tensor or a Module to type checkers
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import assert_same_as_plainly
from torch import Tensor, nn
from torch.func import functional_call

_generator = torch.Generator().manual_seed(5)
TASKS = [(torch.randn(6, 4, generator=_generator), torch.randn(6, 1, generator=_generator)) for _ in range(3)]
X, Y = TASKS[0]


class Net(nn.Module):
    """Layers that are called, a parameter and weights that the forward uses itself, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.second.weight
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x) * self.scale))
        x = F.linear(x, self.second.weight, self.second.bias)
        return self.last(torch.tanh(self.tied(x)))


def lists(*parts: Any) -> list[Any]:
    return [None if part is None else part.tolist() for part in parts]


def state(model: nn.Module) -> list[Any]:
    return lists(*model.state_dict().values())


def gradients(model: nn.Module) -> list[Any]:
    return lists(*(parameter.grad for parameter in model.parameters()))


def maml(model: nn.Module) -> Any:
    """First order: the inner loop's gradients are numbers, the outer gradient goes through all inner weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in TASKS:
        weights = dict(model.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(functional_call(model, weights, (x,)), y)
            found = torch.autograd.grad(loss, list(weights.values()))
            pairs = zip(weights.items(), found, strict=True)
            weights = {name: weight - 0.05 * gradient for (name, weight), gradient in pairs}
        optimizer.zero_grad()
        loss = F.mse_loss(functional_call(model, weights, x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return lists(*losses), state(model)


def weights_of_ones_own(model: nn.Module) -> Any:
    """Plain tensors that require grad get gradients; the model's own parameters get none."""
    weights = {name: item.detach().clone().requires_grad_() for name, item in model.named_parameters()}
    for x, y in TASKS:
        loss = F.mse_loss(functional_call(model, weights, (x,)), y)
        loss.backward()
        with torch.no_grad():
            for weight in weights.values():
                weight -= 0.1 * weight.grad
                weight.grad = None
    return lists(*weights.values()), gradients(model), state(model)


def some_weights_and_statistics(model: nn.Module) -> Any:
    """The statistics that are given are written; those that are not, the model's own, are written too."""
    weight, mean = torch.full((8, 8), 0.1, requires_grad=True), torch.ones(8)
    out = functional_call(model, ({"second.weight": weight}, {"norm.running_mean": mean}), (X,))
    out.square().sum().backward()
    apart = functional_call(model, {"second.weight": weight}, (X,), tie_weights=False)
    return lists(out, apart, weight.grad, mean, model(X)), gradients(model), state(model)


def averaged(model: nn.Module) -> Any:
    other = {name: 0.5 * item + 0.5 for name, item in model.state_dict().items() if item.is_floating_point()}
    model.eval()
    with torch.no_grad():
        return lists(functional_call(model, other, (X,), tie_weights=False), model(X))


def in_the_tables(model: nn.Module) -> Any:
    """`del` and `setattr`, as older code has it; and `module._parameters[...]`."""
    own = dict(model.named_parameters(remove_duplicate=False))
    found = torch.autograd.grad(F.mse_loss(model(X), Y), list(own.values()), allow_unused=True)
    for (name, parameter), gradient in zip(own.items(), found, strict=True):
        module, _, last = name.rpartition(".")
        part = model.get_submodule(module)
        delattr(part, last)
        setattr(part, last, parameter - 0.1 * gradient)
    loss = F.mse_loss(model(X), Y)
    loss.backward()
    for name, parameter in own.items():
        module, _, last = name.rpartition(".")
        delattr(model.get_submodule(module), last)
        setattr(model.get_submodule(module), last, parameter)
    model.first._parameters["weight"] = own["first.weight"] * 0.5  # type: ignore[assignment]
    half = model(X)
    model.first._parameters["weight"] = own["first.weight"]  # type: ignore[assignment]
    return lists(loss, half, model(X)), gradients(model), state(model)


def of_what_lies_between(model: nn.Module) -> Any:
    """The gradient of an activation; and the backward through it afterwards."""
    hidden = model.first(X)
    out = model.last(torch.tanh(model.tied(model.norm(hidden))))
    (found,) = torch.autograd.grad(out.sum(), [hidden], retain_graph=True)
    other, own, none = torch.autograd.grad(
        out.square().sum(), [hidden, model.first.weight, model(X)], retain_graph=True, allow_unused=True
    )
    (out.mean() + (hidden * found).sum()).backward()
    return lists(found, other, own, none), gradients(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "program",
    [maml, weights_of_ones_own, some_weights_and_statistics, averaged, in_the_tables, of_what_lies_between],
    ids=lambda program: program.__name__,
)
def test_a_call_uses_the_tensors_that_are_there(program: Callable[[nn.Module], Any], num_ranks: int) -> None:
    assert_same_as_plainly(Net, program, num_ranks)

"""Gradient hooks on parameters: what they see, collect and change is on every rank what it is in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import X, Y, assert_same_as_plainly, train
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import FarspanError, RecordError


class Branches(nn.Module):
    """Recorded in another order than that in which the parameters are registered, with one that is used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 5)
        self.right = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.left = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x) * self.scale
        right = self.right(x)
        return self.head(x + self.last(torch.relu(left + right)))


class Tied(nn.Module):
    """One weight, used by the first and by the last of its modules, and a parameter used in between and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 5)
        self.d.weight = self.a.weight
        self.shift = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(self.a(x) + self.shift))
        return self.head(self.d(torch.tanh(self.c(x) * self.shift)) + self.shift)


def norms_in_their_order(model: Any) -> Any:
    seen: list[Any] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append((name, gradient.norm().item())))
    return train(model), seen


def gradients_kept(model: Any) -> Any:
    kept: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if "weight" in name:
            parameter.register_hook(lambda gradient, name=name: kept.setdefault(name, []).append(gradient))
    result = train(model)
    return result, {name: [item.tolist() for item in items] for name, items in kept.items()}


def changed_in_several_ways(model: Any) -> Any:
    seen: list[float] = []

    def halve_in_place(gradient: Tensor) -> None:
        gradient.mul_(0.5)

    def of_others(gradient: Tensor) -> Tensor:
        return gradient + model.last.bias.detach().sum() * 0.01

    weights = [item for item in model.parameters() if item.dim() == 2]
    for parameter in weights:
        parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        parameter.register_hook(halve_in_place)
        parameter.register_hook(of_others)
        parameter.register_hook(lambda gradient: seen.append(gradient.sum().item()))
    model.scale.register_hook(torch.zeros_like)
    model.head.bias.register_hook(lambda gradient: torch.ones(5))
    return train(model), seen


def removed_by_itself(model: Any) -> Any:
    seen: list[Any] = []
    handles: dict[str, Any] = {}

    def once(name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            seen.append((name, float(gradient.abs().max())))
            handles[name].remove()

        return hook

    for name, parameter in model.named_parameters():
        handles[name] = parameter.register_hook(once(name))
    return train(model), train(model), seen


def gradients_of_others(model: Any) -> Any:
    """`.grad` in a hook is what was added before; in a post-accumulate hook this gradient is in it."""
    seen: list[Any] = []
    named = dict(model.named_parameters())

    def look(which: str) -> None:
        seen.append((which, [None if item.grad is None else item.grad.sum().item() for item in named.values()]))

    for name, parameter in named.items():
        parameter.register_hook(lambda gradient, name=name: look(f"before {name}"))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: look(f"after {name}"))
    for shift in range(2):
        F.cross_entropy(model(X + shift), Y).backward()
    return seen


def of_autograd_grad(model: Any) -> Any:
    seen: list[float] = []
    model.head.weight.register_hook(lambda gradient: seen.append(gradient.norm().item()))
    model.right[0].bias.register_hook(lambda gradient: gradient * 3)
    found = torch.autograd.grad(model(X).square().sum(), [model.right[0].bias, model.head.weight])
    return [item.tolist() for item in found], seen, [item.grad for item in model.parameters()]


def one_step_in_the_last_hook(model: Any) -> Any:
    """An optimizer of all parameters of a module steps when the last of them has its gradient."""
    optimizer = torch.optim.Adam(model.left[0].parameters(), lr=0.05)
    ready: list[int] = []

    def step(parameter: Tensor) -> None:
        ready.append(parameter.dim())
        if len(ready) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    for parameter in model.left[0].parameters():
        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        losses.append(loss.item())
    return losses, ready, model.left[0].weight.tolist(), str(optimizer.state_dict())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "program",
    [
        norms_in_their_order,
        gradients_kept,
        changed_in_several_ways,
        removed_by_itself,
        gradients_of_others,
        of_autograd_grad,
        one_step_in_the_last_hook,
    ],
)
def test_hooks_on_parameters_are_those_of_one_process(program: Callable[[Any], Any], num_ranks: int) -> None:
    assert_same_as_plainly(Branches, program, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("program", [norms_in_their_order, gradients_kept, removed_by_itself, gradients_of_others])
def test_a_hook_sees_the_whole_gradient_of_what_several_ranks_use(
    program: Callable[[Any], Any], num_ranks: int
) -> None:
    assert_same_as_plainly(Tied, program, num_ranks)


def reads_one_without_a_hook(model: Any) -> None:
    model.head.weight.register_hook(lambda gradient: print(model.left[0].weight.grad))
    model(X).sum().backward()


def steps_too_early(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model(X).sum().backward()


def gives_another_shape(model: Any) -> None:
    model.head.weight.register_hook(lambda gradient: gradient.sum())
    model(X).sum().backward()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (reads_one_without_a_hook, "adds only later"),
        (steps_too_early, "that the backward still needs"),
        (gives_another_shape, "has changed the size of value"),
    ],
)
def test_what_cannot_be_right_in_a_hook_is_an_error(program: Callable[[Any], None], words: str) -> None:
    models = [Branches() for _ in range(2)]
    with pytest.raises((FarspanError, RuntimeError), match=words):
        run_threads(2, lambda rank: program(farspan.distribute(models[rank])))


_LOG: list[float] = []


class Keeper:
    def __init__(self) -> None:
        self.norms: dict[str, float] = {}

    def keep(self, module: nn.Module, gradients: Any, outputs: Any) -> None:
        self.norms["right"] = outputs[0].norm().item()


def counts(model: Any) -> None:
    calls = 0

    def count(module: nn.Module, gradients: Any, outputs: Any) -> None:
        nonlocal calls
        calls += 1

    model.right[2].register_backward_hook(count)


def on_the_module(module: nn.Module, gradients: Any, outputs: Any) -> None:
    module.seen = gradients[0]  # type: ignore[assignment]


def adds_up(model: Any) -> None:
    total = torch.zeros(())

    def add(module: nn.Module, gradients: Any, outputs: Any) -> None:
        total.add_(outputs[0].sum())

    model.head.register_backward_hook(add)


TRACES: dict[str, Callable[[Any], Any]] = {
    "list": lambda model: model.left[2].register_backward_hook(lambda m, given, got: _LOG.append(1.0)),
    "object": lambda model: model.right[2].register_backward_hook(Keeper().keep),
    "variable": counts,
    "module": lambda model: model.last.register_backward_hook(on_the_module),
    "tensor": adds_up,
}


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("trace", TRACES)
def test_a_backward_hook_of_the_deprecated_kind_that_keeps_something_is_an_error(trace: str) -> None:
    def program(model: Any) -> None:
        TRACES[trace](model)
        model(X).sum().backward()
        farspan.flush()

    models = [Branches() for _ in range(2)]
    with pytest.raises(RecordError, match="keeps something") as caught:
        run_threads(2, lambda rank: program(farspan.distribute(models[rank])))
    assert "  try  module.register_full_backward_hook" in str(caught.value)

"""What stands around a module's forward: its class's own `__call__`, hooks of all kinds, a replaced forward."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.plainly import assert_same_as_plainly, train
from torch import Tensor, nn


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Around(Part):
    def __call__(self, *args: Any, factor: float = 0.7, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * factor + args[0]


class Counts(Part):
    """Counts its calls in `__call__`, which is part of the program."""

    num_calls = 0

    def __call__(self, x: Tensor) -> Any:
        self.num_calls += 1
        return super().__call__(x) * self.num_calls


class PastForward(Part):
    def __call__(self, x: Tensor) -> Any:
        return self.forward(x) * 1.3


class Inside(Part):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Around()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(super().forward(x), factor=1.1)


class Two(nn.Module):
    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = nn.Linear(8, 8), part(), part(), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.b(self.a(torch.tanh(self.first(x)))))


def plan_of(num_ranks: int) -> dict[str, str]:
    return {name: f"rank:{i * num_ranks // 4}" for i, name in enumerate(("first", "a", "b", "last"))}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("part", [Around, Counts, PastForward, Inside])
def test_a_class_that_overrides_call_is_applied_once(part: Callable[[], nn.Module], num_ranks: int) -> None:
    assert_same_as_plainly(lambda: Two(part), train, num_ranks, plan=plan_of(num_ranks))


def change_class(model: Any) -> None:
    class Halved(type(model.a)):
        def __call__(self, x: Tensor) -> Any:
            return super().__call__(x) * 0.5

    model.a.__class__ = Halved


def change_forward(model: Any) -> None:
    before = model.b.forward
    model.b.forward = types.MethodType(lambda self, x: before(x) * 0.5, model.b)


@pytest.mark.parametrize("change", [change_class, change_forward])
def test_a_call_that_is_changed_later(change: Callable[[Any], None]) -> None:
    def program(model: Any) -> Any:
        before = train(model)
        change(model)
        return before, train(model)

    assert_same_as_plainly(lambda: Two(Part), program, 2, plan=plan_of(2))


def adds_input(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + 0.3 * args[0]


def looks(module: nn.Module, args: Any, output: Tensor) -> None:
    assert output.norm().item() > 0 and args[0].mean().item() < 9


def scales_gradient(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return (inputs[0] * 1.5,)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(adds_input),
    "looks": lambda module: module.register_forward_hook(looks),
    "pre": lambda module: module.register_forward_pre_hook(lambda module, args: (args[0] * 1.2,)),
    "backward": lambda module: module.register_full_backward_hook(scales_gradient),
    "backward pre": lambda module: module.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,)),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "names",
    [
        ["forward", "pre"],
        ["pre", "backward"],
        ["forward", "backward"],
        ["forward", "backward pre"],
        ["looks", "backward"],
        ["looks", "backward pre", "backward", "pre"],
    ],
    ids=str,
)
def test_hooks_of_several_kinds_on_one_module(names: list[str], num_ranks: int) -> None:
    def program(model: Any) -> Any:
        for name in names:
            HOOKS[name](model.a)
        return train(model)

    assert_same_as_plainly(lambda: Two(Part), program, num_ranks, plan=plan_of(num_ranks))

"""Wrong backwards, and what hooks raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.promises.mistakes.caught import Net, X, Y, distributed, run_all
from torch import Tensor, nn

import farspan


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient @ torch.ones(3, 3)  # here: function


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient, gradient


class Applies(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.linear(x))


class InPlace(nn.Module):
    """Overwrites what the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).exp()
        result = hidden * 2
        hidden.add_(1)
        return result


def model() -> nn.Module:
    return distributed(Net(nn.Linear(8, 8)))


def step(net: nn.Module) -> None:
    loss = nn.functional.cross_entropy(net(X), Y)
    loss.backward()  # here: backward
    loss.item()


def with_hook(register: Callable[[Any], object]) -> None:
    net = model()
    register(net)
    step(net)


def wrong_forward_hook(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result.view(7, 7)  # here: forward hook


def wrong_pre_hook(module: nn.Module, args: Any) -> None:
    raise ValueError(f"{len(args)} arguments")  # here: forward pre-hook


def wrong_backward_hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
    outputs[0].undo_me()  # here: backward hook


def wrong_tensor_hook(gradient: Tensor) -> Tensor:
    return gradient + torch.ones(5)  # here: tensor hook


def wrong_parameter_hook(gradient: Tensor) -> Tensor:
    return gradient[9999]  # here: parameter hook


def wrong_accumulated_hook(parameter: Tensor) -> None:
    raise KeyError("accumulated")  # here: accumulated hook


def hooked_result() -> None:
    net = model()
    hidden = net(X)
    hidden.register_hook(wrong_tensor_hook)
    nn.functional.cross_entropy(hidden, Y).backward()
    farspan.flush()


def twice() -> None:
    loss = nn.functional.cross_entropy(model()(X), Y)
    loss.backward()
    loss.backward()  # here: backward twice
    loss.item()


def of_many() -> None:
    net = model()
    net(X).backward()  # type: ignore[no-untyped-call] # here: backward of many
    farspan.flush()


def of_none() -> None:
    loss = nn.functional.cross_entropy(model()(X), Y).detach()
    loss.backward()  # here: backward of none


def step_of(net: nn.Module) -> None:
    step(distributed(net))


run_all(
    {
        "function": lambda: step_of(Net(Applies(RaisesInBackward))),
        "backward, of a function that counts wrong": lambda: step_of(Net(Applies(Counts))),
        "backward, of what is overwritten": lambda: step_of(Net(InPlace())),
        "forward hook": lambda: with_hook(lambda net: net.bad.register_forward_hook(wrong_forward_hook)),
        "forward pre-hook": lambda: with_hook(lambda net: net.bad.register_forward_pre_hook(wrong_pre_hook)),
        "backward hook": lambda: with_hook(lambda net: net.bad.register_full_backward_hook(wrong_backward_hook)),
        "tensor hook": hooked_result,
        "parameter hook": lambda: with_hook(lambda net: net.bad.weight.register_hook(wrong_parameter_hook)),
        "accumulated hook": lambda: with_hook(
            lambda net: net.bad.weight.register_post_accumulate_grad_hook(wrong_accumulated_hook)
        ),
        "backward twice": twice,
        "backward of many": of_many,
        "backward of none": of_none,
    }
)

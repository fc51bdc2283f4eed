"""Forward hooks on all modules run where the program runs, once for each call."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tests.support.plainly import X, assert_same_as_plainly, train
from torch import Tensor, nn

import farspan

of_all: Any = torch.nn.modules.module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(input=x)
        return self.head(x)


def hooked(model: Any) -> Any:
    """Hooks that keep what they see and change it, beside one of a module's own; then without them."""
    log: list[Any] = []
    model.head.register_forward_hook(lambda module, args, out: log.append("own"))
    before = of_all.register_module_forward_pre_hook(
        lambda module, args: log.append((type(module).__name__, len(args)))
    )
    out = model(X)
    handles = [
        before,
        of_all.register_module_forward_hook(lambda m, args, kwargs, out: log.append([*kwargs]), with_kwargs=True),
        of_all.register_module_forward_hook(lambda m, args, out: out * 1.5 if isinstance(m, nn.Linear) else None),
    ]
    out.sum().backward()
    results = [[p.grad.tolist() for p in model.parameters()], train(model)]
    for handle in handles:
        handle.remove()
    return results, train(model), log


def test_they_see_and_change_what_they_do_in_one_process() -> None:
    assert_same_as_plainly(Net, hooked, 1)


def test_one_that_is_always_called_is_after_an_exception() -> None:
    log: list[str] = []

    def refuse(module: nn.Module, args: Any, out: Tensor) -> None:
        log.append("refuses")
        raise ValueError("refused")

    model = farspan.distribute(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)))
    handles = [
        of_all.register_module_forward_hook(refuse),
        of_all.register_module_forward_hook(lambda m, args, out: log.append(type(m).__name__), always_call=True),
    ]
    try:
        model(X)
    except ValueError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    assert log == ["refuses", "Linear", "Sequential"]


def test_a_call_that_goes_on_in_parts_is_seen_once() -> None:
    log: list[str] = []
    kept: list[float] = []

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(x.detach().sum().item())
            return x * 2

    model = nn.Sequential(nn.Linear(8, 8), Keeps(), nn.Linear(8, 5))
    plain = copy.deepcopy(model)
    handles = [
        of_all.register_module_full_backward_hook(lambda module, given, got: log.append(type(module).__name__)),
        of_all.register_module_forward_hook(lambda module, args, out: log.append(type(module).__name__)),
    ]
    try:
        plain(X.clone().requires_grad_()).sum().backward()
        wanted = [*log]
        log.clear()
        farspan.distribute(model)(X.clone().requires_grad_()).sum().backward()
        farspan.flush()
    finally:
        for handle in handles:
            handle.remove()
    assert log == wanted
    assert kept == [kept[0]] * 2

"""A split backward gives what a whole one gives, bit for bit: gradients, and what hooks on parameters see."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from farspan.execute.backward.split import split_backward

WIDTH = 12


class Applied(nn.Module):
    """A forward of its own over given parts."""

    def __init__(self, forward: Callable[..., torch.Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.function = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, **self.parts)


class Mixed(nn.Module):
    """One parameter, used directly, through a view, and by a node without a rule."""

    def __init__(self, *, with_norm: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.with_norm = with_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ self.weight)
        x = torch.tanh(nn.functional.linear(x, self.weight))
        x = x @ self.weight
        return nn.functional.layer_norm(x, (WIDTH,), self.weight[0]) if self.with_norm else x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * gradients[0] @ weight.t(), 2 * x.flatten(0, -2).t() @ gradients[0].flatten(0, -2)


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 3 * WIDTH, dropout=0.0, batch_first=True)


def scaled_activation(x: torch.Tensor, first: nn.Module, last: nn.Module) -> torch.Tensor:
    x = first(x)
    x.register_hook(lambda gradient: 0.5 * gradient)
    return last(torch.tanh(x))


def hooked(module: nn.Module) -> nn.Module:
    module[1].register_full_backward_hook(lambda module, given, got: (3 * given[0],))  # type: ignore[operator]
    return module


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(5, 8, 3, groups=1, bias=False), nn.GroupNorm(2, 8), nn.PReLU(), nn.ConvTranspose1d(8, 4, 3, stride=2),
        nn.Conv1d(4, 8, 3, groups=2, dilation=2, padding=1),
    )  # fmt: skip


def experts(x: torch.Tensor, a: nn.Bilinear) -> torch.Tensor:
    return torch.einsum("bsd,edf->bsf", x, a.weight).relu_()


def with_autocast(x: torch.Tensor, first: nn.Module, last: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return last(nn.functional.gelu(first(x)))


def reentrant(x: torch.Tensor, first: nn.Module, last: nn.Module) -> torch.Tensor:
    return last(checkpoint(first, x, use_reentrant=True))


def recomputed(x: torch.Tensor, first: nn.Module, last: nn.Module) -> torch.Tensor:
    return last(checkpoint(first, x, use_reentrant=False))


def four_times(x: torch.Tensor, a: nn.Module) -> torch.Tensor:
    for _ in range(4):
        x = torch.tanh(a(x))
    return x


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def two(function: Callable[..., torch.Tensor]) -> Callable[[], nn.Module]:
    return lambda: Applied(function, first=linear(), last=linear())


def frozen_first() -> nn.Module:
    module = nn.Sequential(linear(), linear(), nn.LayerNorm(WIDTH), linear())
    module[1].requires_grad_(False)
    return module


SEQUENCE, IMAGE, SIGNAL = (3, 4, WIDTH), (2, 3, 9, 9), (2, 5, 11)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    # name: how to make it, the shape of its input, how many parameters wait at least
    "mlp": (lambda: nn.Sequential(linear(), nn.Tanh(), nn.Linear(WIDTH, 3, bias=False)), SEQUENCE, 3),
    "transformer": (block, SEQUENCE, 7),
    "lstm": (lambda: Applied(lambda x, a: a(x)[0], a=nn.LSTM(WIDTH, 5)), SEQUENCE, 0),
    "norms of weights": (lambda: nn.Sequential(weight_norm(linear()), nn.ReLU(), spectral_norm(linear())), SEQUENCE, 4),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3)), IMAGE, 4,
    ),
    "signals": (convolutions, SIGNAL, 3),
    "used four times": (lambda: Applied(four_times, a=linear()), SEQUENCE, 2),
    "used in two ways": (lambda: Mixed(with_norm=False), SEQUENCE, 0),
    "used in three ways": (lambda: Mixed(with_norm=True), SEQUENCE, 0),
    "hook on an activation": (two(scaled_activation), SEQUENCE, 4),
    "full backward hook": (lambda: hooked(nn.Sequential(linear(), linear(), nn.Tanh(), linear())), SEQUENCE, 6),
    "experts": (lambda: Applied(experts, a=nn.Bilinear(WIDTH, 6, 4, bias=False)), SEQUENCE, 1),
    "autograd function": (
        lambda: Applied(lambda x, a, b: b(Doubled.apply(x, a.weight)), a=linear(), b=linear()), SEQUENCE, 2,
    ),
    "partly frozen": (frozen_first, SEQUENCE, 4),
    "in place": (lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear()), SEQUENCE, 4),
    "autocast": (two(with_autocast), SEQUENCE, 4),
    "checkpoint": (two(recomputed), SEQUENCE, 2),
    "reentrant checkpoint": (two(reentrant), SEQUENCE, 0),
}  # fmt: skip


def watch(module: nn.Module) -> list[tuple[str, str, torch.Tensor]]:
    """Hooks on all parameters: one changes the gradient, the other looks at `.grad`."""
    seen: list[tuple[str, str, torch.Tensor]] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:

            def scale(gradient: torch.Tensor, name: str = name) -> torch.Tensor:
                seen.append((name, "gradient", gradient.clone()))
                return 1.25 * gradient

            def look(parameter: torch.Tensor, name: str = name) -> None:
                assert parameter.grad is not None
                seen.append((name, "sum", parameter.grad.clone()))

            parameter.register_hook(scale)
            parameter.register_post_accumulate_grad_hook(look)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_two_halves_give_what_a_whole_backward_gives(name: str) -> None:
    make, shape, num_waiting = CASES[name]
    torch.manual_seed(1)
    plain = make()
    split = copy.deepcopy(plain)
    logs = [watch(plain), watch(split)]
    for micro_batch in range(2):  # the second adds to what is there
        x = torch.randn(shape)
        inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
        outputs = [plain(inputs[0]), split(inputs[1])]
        seed = torch.randn_like(outputs[0])
        outputs[0].backward(seed)
        cut = split_backward([outputs[1]], [inputs[1]], [])
        later = cut.run_first_half([outputs[1]], [seed])
        del outputs
        assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
        waiting = [] if later is None else [node.variable for node in later.accumulators]
        assert len(waiting) >= num_waiting
        assert not {id(node.variable) for node in cut.now} & set(map(id, waiting))
        if micro_batch == 0:
            assert all(parameter.grad is None for parameter in waiting)
        if later is not None:
            later.run()
    for (label, one), other in zip(plain.named_parameters(), split.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), label
        assert one.grad is None or torch.equal(one.grad, other.grad), label  # type: ignore[arg-type]
    for (label, one), other in zip(plain.named_buffers(), split.buffers(), strict=True):
        assert torch.equal(one, other), label
    in_order = [sorted(log, key=lambda item: item[:2]) for log in logs]
    assert [item[:2] for item in in_order[0]] == [item[:2] for item in in_order[1]]
    assert all(torch.equal(one[2], other[2]) for one, other in zip(*in_order, strict=True))

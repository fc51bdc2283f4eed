"""Three small models, and how they are slowed down: their layers sleep for as long as their work would take a device.

             forward                backward              weight gradient    each layer gets the share of the model's
linear, conv |= product =|sleep   | ... |sleep   | ...    | ... |sleep   |   seconds that it has of its multiply-adds,
                                                                             a third of them in each of the three
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from gpt import GPT

__all__ = ["CASES", "Case", "set_speed", "start_clock"]

_PRODUCTS = (nn.Linear, nn.Conv2d)
_speed = 1.0
_computed_s = ContextVar("_computed_s", default=0.0)
"""Of this process's thread, up to the last pause. No plain number: a layer that changes one is called part by part."""


def set_speed(speed: float) -> None:
    """How fast this process's device is; at most 1, what this core has."""
    global _speed
    _speed = speed


def start_clock() -> None:
    """What this process has computed so far was not the device's work."""
    _computed_s.set(time.thread_time())


def _pause(seconds: float) -> None:
    """Sleep for as long as it takes a device, which is as much slower than this core at what the core has computed."""
    since = time.thread_time() - _computed_s.get()
    time.sleep(seconds / _speed + since * (1 / _speed - 1))
    _computed_s.set(time.thread_time())


class _Pause(torch.autograd.Function):
    """The same tensor; its gradient comes so many seconds later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _pause(ctx.seconds)
        return gradients[0], None


class _SlowLinear(nn.Linear):
    """Its weight's gradient comes through a node of its own, and so can come later."""

    pause_s: float

    def forward(self, input: Tensor) -> Tensor:
        _pause(self.pause_s)
        weight: Any = _Pause.apply(self.weight, self.pause_s)
        return _Pause.apply(F.linear(input, weight, self.bias), self.pause_s)  # type: ignore[no-any-return]


class _SlowConv2d(nn.Conv2d):
    """The same of a convolution."""

    pause_s: float

    def forward(self, input: Tensor) -> Tensor:
        _pause(self.pause_s)
        weight: Any = _Pause.apply(self.weight, self.pause_s)
        made = F.conv2d(input, weight, self.bias, padding=self.padding)
        return _Pause.apply(made, self.pause_s)  # type: ignore[no-any-return]


def _slowed(model: nn.Module, example: Tensor, seconds: float) -> nn.Module:
    """Let the layers of `model` that make products take `seconds` together, forward and backward of `example`."""
    work: dict[nn.Module, float] = {}

    def note(layer: nn.Module, given: Any, made: Tensor) -> None:
        weight: Any = layer.weight
        channels = made.shape[-1] if isinstance(layer, nn.Linear) else made.shape[1]
        work[layer] = weight.numel() * made.numel() / channels

    layers = [layer for layer in model.modules() if isinstance(layer, _PRODUCTS)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    with torch.no_grad():
        model(example)
    for hook in hooks:
        hook.remove()
    for layer in layers:
        slow: Any = layer
        slow.__class__ = _SlowLinear if isinstance(layer, nn.Linear) else _SlowConv2d
        slow.pause_s = seconds * work[layer] / sum(work.values()) / 3
    return model


class Double(nn.Module):
    """Two convolutions of a U-Net."""

    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(given, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))))


class UNet(nn.Module):
    """Four resolutions; what goes down is handed over to the way up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, width, 2 * width, 3 * width]
        self.down = nn.ModuleList([Double(given, made) for given, made in pairwise([3, *widths[:-1]])])
        self.middle = Double(widths[-2], widths[-1])
        self.up = nn.ModuleList([Double(below + here, here) for here, below in reversed(list(pairwise(widths)))])
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        handed: list[Tensor] = []
        for block in self.down:
            x = block(x)
            handed.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), handed.pop()], 1))
        return self.last(x)


class Layer(nn.Module):
    """Of an encoder, or with what the encoder has made, of a decoder."""

    def __init__(self, width: int, *, is_decoder: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3 if is_decoder else 2)])
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        if is_decoder:
            self.query = nn.Linear(width, width)
            self.key_value = nn.Linear(width, 2 * width)
            self.cross_out = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        query, key, value = self.mix(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=memory is not None))
        if memory is not None:
            key, value = self.key_value(memory).chunk(2, -1)
            query = self.query(self.norms[2](x))
            x = x + self.cross_out(F.scaled_dot_product_attention(query, key, value))
        return x + self.back(F.gelu(self.wide(self.norms[1](x))))


class EncoderDecoder(nn.Module):
    """A long sequence is read, a short one is written."""

    def __init__(self, width: int, num_layers: int, short: int) -> None:
        super().__init__()
        self.short = short
        self.embedding = nn.Embedding(256, width)
        self.encoder = nn.ModuleList([Layer(width, is_decoder=False) for _ in range(num_layers)])
        self.decoder = nn.ModuleList([Layer(width, is_decoder=True) for _ in range(num_layers)])
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        memory, x = self.embedding(tokens), self.embedding(tokens[:, : self.short])
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, what a micro-batch of it is, and the speeds of the devices, the fastest first."""

    make: Callable[[], nn.Module]
    example: Callable[[], Tensor]
    speeds: tuple[float, ...]

    def model(self, seconds: float) -> nn.Module:
        """Takes `seconds` for a micro-batch on a device of speed 1; equal in every process."""
        torch.manual_seed(0)
        return _slowed(self.make(), self.example(), seconds)


def _tokens(batch: int, sequence: int) -> Tensor:
    return torch.randint(256, (batch, sequence), generator=torch.Generator().manual_seed(1))


CASES = {
    "gpt": Case(
        make=lambda: GPT(width=32, num_heads=2, num_blocks=8, context=32),
        example=lambda: _tokens(20, 32),
        speeds=(1.0, 1.0, 0.5, 0.5),
    ),
    "unet": Case(
        make=lambda: UNet(8),
        example=lambda: torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)),
        speeds=(1.0, 0.6, 0.4),
    ),
    "encoder-decoder": Case(make=lambda: EncoderDecoder(32, 4, 8), example=lambda: _tokens(20, 32), speeds=(1.0, 0.4)),
}

"""Small models of many shapes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "MLP",
    "GPT",
    "UNet",
    "Translator",
    "Siamese",
    "ViT",
    "ThereAndBack",
    "Backwards",
    "Messenger",
    "WithSquash",
    "Frozen",
    "Normed",
    "Regularised",
]


# An MLP.


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(6)])
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)) + x
        return self.head(x)


# A GPT, with and without tied embedding.


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, *, vocab: int = 17, width: int = 16, blocks: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.randn(1, 32, width) * 0.02)
        self.blocks = nn.ModuleList([Block(width, 2) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[:, : ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# A U-Net whose skips cross stages.


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [3, 4, 6, 8]
        self.down = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList(
            [nn.Conv2d(16, 6, 3, padding=1), nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)]
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = F.relu(self.middle(x))
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = F.relu(layer(torch.cat([x, skips.pop()], 1)))
        return x


# An encoder-decoder.


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(11, 16)
        self.target = nn.Embedding(11, 16)
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3)])
        self.decoder = nn.ModuleList([nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(16, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.target(target)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


# Features that later modules use, and at last the module's own code, where they came from.


class Regularised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.layers = nn.ModuleList([nn.Linear(10, 10) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.first(x))
        for layer in self.layers:
            x = torch.tanh(layer(features)) + x * features
        return x * features.square().sum() + features.abs().mean()


# A siamese net: one module called twice.


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh()
        )
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x))


# A container that uses a parameter of its own.


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(8, 16)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16))
        self.position = nn.Parameter(torch.randn(1, 5, 16))
        self.blocks = nn.ModuleList([Block(16, 2) for _ in range(4)])
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


# A list walked forwards and backwards.


class ThereAndBack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(10, 10) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x)) + 0.1 * x
        return x


class Backwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(10, 10) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


# Dictionaries, dataclasses and None between the parts.


@dataclass
class State:
    hidden: Tensor
    extra: Tensor | None
    name: str = "state"


class Part(nn.Module):
    def __init__(self, give_extra: bool) -> None:
        super().__init__()
        self.give_extra = give_extra
        self.linear = nn.Linear(10, 10)

    def forward(self, state: State, options: dict[str, Any]) -> tuple[State, dict[str, Any]]:
        hidden = torch.tanh(self.linear(state.hidden)) * options["scale"]
        if state.extra is not None:
            hidden = hidden + state.extra
        extra = hidden.detach() if self.give_extra else None
        return State(hidden, extra, state.name), {**options, "seen": hidden.sum(1), "nothing": None}


class Messenger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(number % 2 == 0) for number in range(4)])
        self.out = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, options = State(x, None), {"scale": 0.5, "list": [1, "two", None]}
        for part in self.parts:
            state, options = part(state, options)
        return self.out(state.hidden) + options["seen"][:, None]


# A stage that has no parameter.


class Squash(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * 1.5


class WithSquash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.squash = Squash()
        self.last = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.squash(self.first(x)))


# A frozen stage.


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(10, 10) for _ in range(6)])
        for number in (0, 1, 3):
            self.layers[number].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


# BatchNorm, and a value used many times.


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for block in self.blocks:
            x = block(x) + total
            total = total + x
        return total

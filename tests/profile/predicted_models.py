"""Models of the forms that a prediction must get right: branches, skips, several users of a value, frozen, tied."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = [
    "Block",
    "Dense",
    "Encoder",
    "Frozen",
    "Layer",
    "Masked",
    "Residual",
    "Skip",
    "Tied",
    "Times",
    "UNet",
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(F.gelu(self.wide(self.norm(x))))


class Residual(nn.Module):
    """Like a GPT, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList([Block(64) for _ in range(9)])
        self.head = nn.Linear(64, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class UNet(nn.Module):
    """What goes down is handed over to the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(given, 8, 3, padding=1) for given in (3, 8)])
        self.middle = nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(given, 8, 3, padding=1) for given in (24, 16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handed = []
        for block in self.down:
            x = F.relu(block(x))
            handed.append(x)
            x = F.max_pool2d(x, 2)
        x = F.relu(self.middle(x))
        for block in self.up:
            x = F.relu(block(torch.cat([F.interpolate(x, scale_factor=2.0), handed.pop()], 1)))
        return x


class Skip(nn.Module):
    """The wide end uses what the wide beginning has made."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 8, 3, padding=1)
        self.narrow = nn.Conv2d(8, 8, 3, padding=1)
        self.both = nn.Conv2d(16, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.wide(x))
        below = F.interpolate(F.relu(self.narrow(F.max_pool2d(x, 2))), scale_factor=2.0)
        return self.last(F.relu(self.both(torch.cat([below, x], 1))))


class Layer(nn.Module):
    def __init__(self, num_before: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8 + 4 * num_before)
        self.conv = nn.Conv2d(8 + 4 * num_before, 4, 3, padding=1)

    def forward(self, made: list[torch.Tensor]) -> torch.Tensor:
        return self.conv(F.relu(self.norm(torch.cat(made, 1))))


class Dense(nn.Module):
    """Each layer is given all that was made before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList([Layer(number) for number in range(6)])
        self.last = nn.Conv2d(8 + 24, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [self.first(x)]
        for layer in self.layers:
            made.append(layer(made))
        return self.last(torch.cat(made, 1))


class Encoder(nn.Module):
    """What is called first is registered last, and wide branches leave it on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(64, 3, 1)
        self.up = nn.ModuleList([nn.Conv2d(16, 64, 3, padding=1) for _ in range(3)])
        self.down = nn.ModuleList([nn.Conv2d(given, 16, 3, padding=1) for given in (3, 16, 16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: Any = 0
        for down, up in zip(self.down, self.up, strict=True):
            x = F.gelu(down(x))
            total = total + F.gelu(up(x))
        return self.head(total)


class Masked(nn.Module):
    """What the first module makes gets no gradient, and all others use it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64).requires_grad_(False)
        self.layers = nn.ModuleList([Times(64) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (self.first(x) > 0).float()
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Times(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * mask


class SlowBlock(Block):
    """As one on a slow device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return super().forward(x)


class Frozen(nn.Module):
    """Most of it is not trained; what that part sends, the other waits for, on a machine of any load."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SlowBlock(64), *[Block(64) for _ in range(11)]])
        self.blocks[:10].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Tied(nn.Module):
    """The head has the weight of the embedding, which is elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList([Block(64) for _ in range(4)])
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

"""Small pictures with something on them: a disc, a square, a cross or a stripe."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["NUM_KINDS", "draw_pictures"]

NUM_KINDS = 4


def draw_pictures(num: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pictures [num, 1, size, size] from 0 to 1, with some noise, and the kind of each, [num]."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(NUM_KINDS, (num,), generator=generator)
    center = size * (0.35 + 0.3 * torch.rand(num, 2, 1, 1, generator=generator))
    radius = size * (0.15 + 0.15 * torch.rand(num, 1, 1, generator=generator))
    row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    down, right = (row - center[:, 0]).abs(), (column - center[:, 1]).abs()
    shapes = torch.stack(
        [
            down.square() + right.square() < radius.square(),
            torch.maximum(down, right) < radius,
            (torch.minimum(down, right) < radius / 3) & (torch.maximum(down, right) < radius),
            down < radius / 2,
        ]
    )
    pictures = shapes[kinds, torch.arange(num)].float()
    noise = 0.1 * torch.rand(num, size, size, generator=generator)
    return (0.9 * pictures + noise).unsqueeze(1), kinds

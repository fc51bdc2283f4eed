"""Small models for `follow_rows`, made of one forward each, and what they are called with.

Every size is 6, as far as it may be: rows, time, width. That sizes are equal must not be taken for a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Forward", "Snippet", "floats", "of", "row_numbers", "with_labels", "with_numbers", "with_square"]

Forward = Callable[..., Any]


class Snippet(nn.Module):
    """A forward that is given the module, and has a few parameters there."""

    w: Tensor
    b: Tensor
    table: Tensor
    plain: Tensor

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(6, 6, generator=generator, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(6, generator=generator, dtype=torch.float64))
        self.table = nn.Parameter(torch.randn(20, 6, generator=generator, dtype=torch.float64))
        self.plain = torch.zeros(6, dtype=torch.float64)
        self.function = forward

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def floats(rows: int) -> tuple[Any, ...]:
    """[rows, 6, 6]"""
    return (torch.randn(rows, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64),)


def with_square(rows: int) -> tuple[Any, ...]:
    """[rows, 6, 6], and [6, 6], which is no batch"""
    return (*floats(rows), torch.randn(6, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64))


def with_numbers(rows: int) -> tuple[Any, ...]:
    """[rows, 6, 6], and numbers of 0 to 5 [rows, 6]"""
    return (*floats(rows), torch.randint(0, 6, (rows, 6), generator=torch.Generator().manual_seed(5)))


def with_labels(rows: int) -> tuple[Any, ...]:
    """[rows, 6, 6], and a class of each row; of some it is unknown"""
    return (*floats(rows), torch.tensor([0, -100, 2, 3, -100, 5, 1, 2, 0])[:rows])


def of(make: Any, **functions: Forward) -> dict[str, tuple[Forward, Any]]:
    return {name: (function, make) for name, function in functions.items()}


def row_numbers(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])

"""Metadata: all that every rank knows of a tensor without having it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from math import prod
from typing import Any

__all__ = ["Meta"]

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Meta:
    """The metadata of a tensor, which every rank knows without having it. `dtype` and `device` are torch's own
    objects."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    device: Any
    requires_grad: bool
    is_parameter: bool = False
    """True for a leaf of autograd, which must not be written in place where gradients are recorded."""

    numel: int = field(init=False, compare=False, default=0)
    size_bytes: int = field(init=False, compare=False, repr=False, default=0)
    """Memory that the elements take."""
    number: int = field(init=False, compare=False, repr=False, default=0)
    """The number of this object in this process: unlike its `id`, no other ever gets it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", prod(self.shape))
        object.__setattr__(self, "size_bytes", self.numel * self.dtype.itemsize)
        object.__setattr__(self, "number", next(_numbers))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

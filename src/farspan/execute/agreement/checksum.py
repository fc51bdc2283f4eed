"""Cheap checksums of the plain tensors that calls are given, compared between the ranks in every step.

Every rank reads the same batches; where one does not, parts of different batches would be mixed without a word. Of each
tensor at most `_MOST` elements are read, evenly spread: of whole numbers all their bits. Floating-point numbers
that processors of different kinds have computed differ in their last bits, so of these the means of some groups, and
their size, are rounded to a grid. A number close to the border between two cells of a grid may be rounded to the one
here and to the other there: so there are three grids, each a third of a cell further, and ranks agree where one of them
says so.

    grid 0   |     a b     |             |        a and b are in one cell
    grid 1       |       a | b           |        of this grid they are not
    grid 2           |  a b        |
"""

from __future__ import annotations

import functools
import math
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from farspan.comm.tensor_bytes import array_of
from farspan.torch_private import DisableTorchFunction

__all__ = ["Checksum", "checksum_of", "checksum_of_all", "is_comparable"]

_NUM_GRIDS = 3
Checksum = tuple[int, ...]
"""A checksum: one number for each grid."""

_MOST = 1 << 10
_NUM_GROUPS = 16
_CELLS, _CELLS_OF_SIZE = 256.0, 4096.0
"""Cells of a grid: so many for the mean size of all numbers, and for each factor of e of that size itself."""


def is_comparable(tensor: Any) -> bool:
    """Returns whether the data of `tensor` are numbers that lie in memory."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
    )


def checksum_of(tensor: torch.Tensor) -> Checksum:
    """Returns the checksum of a plain tensor that `is_comparable`."""
    with DisableTorchFunction():
        sample = _sample_of(tensor.detach())
    if sample.dtype.kind != "f":
        return (zlib.crc32(sample.tobytes()),) * _NUM_GRIDS
    return _of_floats(sample)


def checksum_of_all(found: Sequence[Checksum]) -> Checksum:
    """Returns one checksum of several tensors."""
    if not found:
        return (0,) * _NUM_GRIDS
    return tuple([zlib.crc32(array("q", column)) for column in zip(*found, strict=True)])


def _sample_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Elements of `tensor`, in one dimension and next to each other."""
    if tensor.device.type != "cpu":
        tensor = tensor.reshape(-1)[:: _step_for(tensor.numel())].cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    elif tensor.dtype.is_floating_point and tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.reshape(-1)[:: _step_for(tensor.numel())].float()
    data = array_of(tensor.resolve_neg())
    if data.size <= _MOST:
        return np.ascontiguousarray(data).reshape(-1)
    step = _step_for(data.size)
    return np.ascontiguousarray(data.reshape(-1)[::step] if data.flags.c_contiguous else data.flat[::step])


@functools.lru_cache(maxsize=128)
def _step_for(size: int) -> int:
    """Returns the least step that leaves at most `_MOST` of `size` elements and covers all columns, rows and
    channels."""
    step = max(1, -(-size // _MOST))
    while math.gcd(step, size) != 1:
        step += 1
    return step


@functools.lru_cache(maxsize=128)
def _groups_of(size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns where each group of `size` elements begins, and how many elements it has."""
    begins = np.unique(np.linspace(0, size, _NUM_GROUPS, endpoint=False).astype(np.int64))
    return begins, np.diff(begins, append=size).astype(np.float64)


def _of_floats(sample: np.ndarray[Any, Any]) -> Checksum:
    if not sample.size:
        return (0,) * _NUM_GRIDS
    sample = sample.astype(np.float64)
    size = float(np.abs(sample).mean())
    beyond = 0
    if not math.isfinite(size):
        beyond = zlib.crc32(np.isfinite(sample).tobytes())
        sample = np.nan_to_num(sample, posinf=0.0, neginf=0.0)
        size = float(np.abs(sample).mean())
    if size == 0.0:
        return (beyond,) * _NUM_GRIDS
    begins, counts = _groups_of(len(sample))
    cells = np.append(np.add.reduceat(sample, begins) / counts * (_CELLS / size), math.log(size) * _CELLS_OF_SIZE)
    return tuple([zlib.crc32(np.floor(cells + grid / _NUM_GRIDS).tobytes(), beyond) for grid in range(_NUM_GRIDS)])

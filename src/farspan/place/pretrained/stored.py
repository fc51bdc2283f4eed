"""One tensor of a safetensors file: known by its form, read when its data are needed, and by whoever needs them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import safetensors
import torch

from farspan.errors import FarspanError

__all__ = ["Stored", "read_stored", "stored_in", "torch_dtype"]

_open: Any = safetensors.safe_open  # itself, also while another function stands for it
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor in a file.

    Attributes:
        path: Of the file.
        version: What the file was when it was looked at: its size and when it was written last.
        name: Of the tensor.
        dtype: As safetensors names it.
        shape: Of the whole tensor.
        part: What is wanted of it, as an index; None for all.
    """

    path: str
    version: tuple[int, int]
    name: str
    dtype: str
    shape: tuple[int, ...]
    part: Any = None


def torch_dtype(stored: Stored) -> torch.dtype | None:
    """Returns the dtype of a tensor in a file; None for one that torch cannot hold as one of its own."""
    return _DTYPES.get(stored.dtype)


def stored_in(path: str, file: Any) -> dict[str, Stored]:
    """Returns the tensors of an open safetensors file, by name."""
    version = _version(path)
    found: dict[str, Stored] = {}
    for name in file.keys():  # noqa: SIM118, for a safetensors file is no dictionary
        piece = file.get_slice(name)
        form = {"dtype": str(piece.get_dtype()), "shape": tuple(piece.get_shape())}
        found[name] = Stored(path=path, version=version, name=name, **form)
    return found


def read_stored(stored: Stored) -> torch.Tensor:
    """Returns the data: memory of the file, which goes when the tensor does, and must not be written to.

    Raises:
        FarspanError: The file is not what it was, or is gone.
    """
    try:
        version = _version(stored.path)
        if version == stored.version:
            with _open(stored.path, framework="pt") as file:
                piece = file.get_slice(stored.name)
                return piece[...] if stored.part is None else piece[stored.part]
        why = "it has been written again since."
    except OSError as error:
        why = f"{error}."
    raise FarspanError(
        f"{stored.name} cannot be read from {stored.path}, where it was found.",
        why=why,
        hint="keep the files of a model until farspan.distribute(model) has returned",
    )


def _version(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns

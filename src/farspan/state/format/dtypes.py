"""Names and sizes of the elements of tensors, for torch and for safetensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["ITEM_BYTES", "in_file", "num_bytes"]

_KNOWN = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
_AS_BYTES = {"complex32": 4, "complex128": 16, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1}
"""Dtypes that safetensors does not know: stored as bytes, one more dim behind the others."""
ITEM_BYTES = {name: size for name, (_, size) in _KNOWN.items()} | _AS_BYTES


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Returns the size of a tensor.

    >>> num_bytes("float32", (2, 3))
    24
    """
    return ITEM_BYTES[dtype] * math.prod(shape)


def in_file(dtype: str, shape: Sequence[int]) -> tuple[str, list[int]]:
    """Returns the dtype and shape that a safetensors file gives to a tensor.

    >>> in_file("complex128", (3,))
    ('U8', [3, 16])
    """
    if dtype in _AS_BYTES:
        return "U8", [*shape, _AS_BYTES[dtype]]
    return _KNOWN[dtype][0], [*shape]

"""Tensors as bytes: no pickle, so nothing that arrives can run."""

from __future__ import annotations

import ctypes
import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from farspan.call.wire.checked import damaged
from farspan.torch_private import DisableTorchFunction

__all__ = [
    "array_of",
    "buffer_of",
    "crc_of",
    "overwrite",
    "pack_tensor",
    "raw_bytes",
    "size_of",
    "sparse_tensor",
    "unpack_tensor",
]

_MOST_DIMENSIONS = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex32, torch.complex64,
        torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip


def pack_tensor(tensor: torch.Tensor) -> tuple[dict[str, Any], memoryview]:
    """(header, bytes) of a tensor of any device and layout."""
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    if plain.data_ptr() == tensor.data_ptr():
        plain = plain.clone()  # the sender may write to it before it is sent
    header = {"dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}
    return header, buffer_of(plain)


def size_of(header: Any) -> int:
    """Returns the bytes of a tensor, as its header says.

    Raises:
        RecordError: It says nothing that a tensor could be.
    """
    fields = header if isinstance(header, dict) else {}
    dtype, shape = fields.get("dtype"), fields.get("shape")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise damaged("a tensor without a shape")
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        raise damaged("a tensor whose shape is none")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise damaged("a tensor without a dtype")
    return math.prod(shape) * _DTYPES[dtype].itemsize


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a contiguous tensor, [bytes]. Where a size is 1, its stride may be anything, 0 too."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the CPU, for as long as the tensor lives.

    An array made of it would say the same, but torch marks memory that arrays share: it could never be told from the
    program's own sharing.
    """
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory._tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def crc_of(tensor: torch.Tensor) -> int:
    """Returns a checksum of a tensor's data; 0 for one whose data do not lie in memory as they are."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        return 0
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return zlib.crc32(buffer_of(plain))


def overwrite(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Write `data` into a tensor, which autograd does not see; one that is expanded too."""
    with torch.no_grad(), DisableTorchFunction():
        memory = tensor.detach()
        for dim, step in enumerate(tensor.stride()):
            if step == 0:  # expanded: one element stands for many
                memory, data = memory.narrow(dim, 0, 1), data.narrow(dim, 0, 1)
        memory.copy_(data)


class _Memory:
    """The interface from which numpy makes an array over a tensor's memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple([step * tensor.element_size() for step in tensor.stride()]),
            "typestr": _type_of(tensor.dtype).str,
        }


@functools.cache
def _type_of(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns a read-only array of a plain tensor on the CPU, over the same memory, which is not marked as shared by
    it."""
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), _type_of(tensor.dtype))
    return np.asarray(_Memory(tensor))


def unpack_tensor(header: dict[str, Any], payload: bytes | bytearray | memoryview) -> torch.Tensor:
    """Returns the tensor of `pack_tensor`; it owns `payload`'s memory if that can be written to.

    Raises:
        RecordError: The payload is not of the size that the header says.
    """
    size = size_of(header)
    if size != len(payload):
        raise damaged(f"{len(payload)} bytes for a tensor of {size}")
    dtype, shape = _DTYPES[header["dtype"]], header["shape"]
    if not payload:
        return torch.empty(shape, dtype=dtype)
    buffer = payload if isinstance(payload, bytearray) else bytearray(payload)
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)


def sparse_tensor(
    indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int], is_coalesced: bool
) -> torch.Tensor:
    """Returns a sparse tensor of parts that another rank has sent: an index outside of it would be a write outside its
    memory.

    Raises:
        RecordError: The parts do not fit.
    """
    try:
        return torch.sparse_coo_tensor(
            indices, values, torch.Size(shape), is_coalesced=is_coalesced, check_invariants=True
        )
    except RuntimeError as error:
        raise damaged(f"a sparse tensor ({str(error).splitlines()[0][:100]})") from None

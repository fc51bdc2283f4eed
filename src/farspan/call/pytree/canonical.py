"""Digests that are equal on all ranks for what is equal: of bytes that say it, in one way only.

Python's own `hash` differs from process to process (strings), and is equal for what differs (-1 and -2). `repr` follows
the order of sets, and holds addresses. So whatever goes into a digest is written down here: sets in the order of what
their members are written as, floating-point numbers bit for bit, enums, classes and functions by their qualified names,
other objects by the names of their classes.
"""

from __future__ import annotations

import enum
import hashlib
import types
import zlib
from typing import Any

import numpy as np
import torch

from farspan.call.pytree.by_id import ById
from farspan.devices import device_types
from farspan.graph import Meta

__all__ = ["canonical", "digest_of", "is_plain"]

_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_IN_WORDS = (torch.dtype, torch.layout, torch.memory_format, torch.device, range)
_MOST_BYTES = 1 << 20
"""Limit on the bytes of an array that are read; of a longer one only the beginning counts."""


def digest_of(parts: Any) -> int:
    """Returns a number of 56 bits that is equal on all ranks for what is equal."""
    return int.from_bytes(hashlib.blake2b(canonical(parts), digest_size=7).digest(), "big")


def canonical(item: Any) -> bytes:
    """Returns bytes that are equal on all ranks for what is equal, and differ for what differs.

    Args:
        item: Templates, metadata, modes, plain values, and tuples, lists, dictionaries and sets of them.
    """
    parts: list[bytes] = []
    _write(item, parts)
    return b"".join(parts)


def is_plain(item: Any) -> bool:
    """Returns whether `canonical` says all there is to say of a value, and it will not change."""
    kind = type(item)
    return kind in _PLAIN or (kind in (tuple, frozenset) and all(map(is_plain, item)))


def _write(item: Any, parts: list[bytes]) -> None:
    kind = type(item)
    if kind is tuple or kind is list or kind is torch.Size:
        parts.append(b"(%d:" % len(item))
        for each in item:
            _write(each, parts)
    elif kind is str:
        _put(b"s", _without_index(item).encode(errors="surrogatepass"), parts)
    elif kind is bool or item is None or item is Ellipsis or item is NotImplemented:
        _put(b"b", repr(item).encode(), parts)
    elif kind is int:
        parts.append(b"i%d;" % item)
    elif kind is float:
        _put(b"f", item.hex().encode(), parts)
    elif kind is complex:
        _write((item.real, item.imag), parts)
    elif kind is bytes:
        _put(b"y", item, parts)
    elif kind is set or kind is frozenset:
        members = sorted(map(canonical, item))
        _put(b"{%d:" % len(members), b"".join(members), parts)
    elif kind is dict:
        _write(tuple(item.items()), parts)
    elif isinstance(item, enum.Enum):
        _put(b"e", f"{_qualified(kind)}.{item.name}".encode(), parts)
    elif kind is Meta:
        _write((item.shape, item.stride, item.dtype, item.device.type, item.requires_grad, item.is_parameter), parts)
    elif kind is ById and type(item.value) in (float, complex):
        _write(item.value, parts)
    elif kind is ById:
        _write_by_name(item.value, parts)
    elif isinstance(item, _NAMED):
        _put(b"n", _qualified(item).encode(), parts)
    elif isinstance(item, torch.SymInt):
        parts.append(b"S")  # which numbers stand in its place is digested apart
    elif kind is torch.device:
        _put(b"w", item.type.encode(), parts)  # each rank has numbers of its own for its devices
    elif isinstance(item, _IN_WORDS):
        _put(b"w", repr(item).encode(), parts)
    else:
        _write_by_name(item, parts)


def _without_index(text: str) -> str:
    """Returns the type of a device for the name of one, as it is given to `x.to("cuda:1")`."""
    kind, colon, index = text.partition(":")
    return kind if colon and index.isdigit() and kind in device_types() else text


def _write_by_name(item: Any, parts: list[bytes]) -> None:
    """Write what templates hold by identity."""
    if isinstance(item, (np.ndarray, np.generic)):
        _write(("array", item.dtype.str, item.shape), parts)
        if not item.dtype.hasobject:
            parts.append(b"%08x" % zlib.crc32(np.ascontiguousarray(item).tobytes()[:_MOST_BYTES]))
    elif isinstance(item, types.ModuleType):
        _put(b"m", item.__name__.encode(), parts)
    else:
        _put(b"o", _qualified(item if isinstance(item, _NAMED) else type(item)).encode(), parts)


def _put(tag: bytes, content: bytes, parts: list[bytes]) -> None:
    parts.append(b"%s%d:" % (tag, len(content)))
    parts.append(content)


def _qualified(item: Any) -> str:
    return f"{getattr(item, '__module__', '')}.{getattr(item, '__qualname__', type(item).__qualname__)}"

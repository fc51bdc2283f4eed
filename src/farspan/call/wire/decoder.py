"""JSON from another rank as values: numbers, texts, tuples, arrays, tensors' metadata, and what is known by name."""

from __future__ import annotations

import base64
import enum
import math
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from farspan.call.infer.entry import intern
from farspan.call.pytree.by_id import ById
from farspan.call.wire.checked import damaged
from farspan.call.wire.known_classes import Known
from farspan.errors import RecordError
from farspan.graph import Meta

__all__ = ["ARRAY_TYPE", "AS_LISTS", "MOST_DEPTH", "TORCH_NAMES", "UNNAMED", "Decoder", "decode_metas", "unknown_class"]

_PLAIN = (bool, int, str, type(None))
UNNAMED = {
    kind.__name__: kind
    for kind in (
        type(None), type(Ellipsis), type(NotImplemented), types.FunctionType, types.BuiltinFunctionType,
        types.MethodType, types.ModuleType,
    )
}  # fmt: skip
"""Classes that are not found under their own names."""
AS_LISTS: dict[str, type] = {"tuple": tuple, "frozenset": frozenset, "size": torch.Size}
TORCH_NAMES = (torch.dtype, torch.layout, torch.memory_format)
_OF_TORCH = {str(item).removeprefix("torch."): item for item in vars(torch).values() if type(item) in TORCH_NAMES}
MOST_DEPTH = 400
_MOST_DIMENSIONS = 64
_DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,3})?")
ARRAY_TYPE = re.compile(r"[<>|=][biufcSUmM][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,3}\])?")


class Decoder:
    """Makes what `_encode` has written: numbers, texts, tuples of them, and what is named.

    Args:
        known: What may be named.
        given: What this rank holds by identity, in order.
    """

    def __init__(self, known: Known, given: Sequence[Any]) -> None:
        self.known = known
        self.given = given
        self._found: dict[str, Any] = {}

    def decode(self, item: Any, depth: int = 0) -> Any:
        """Returns the value of one part of a document.

        Raises:
            RecordError: It is none, or names what this rank does not have.
        """
        if type(item) in _PLAIN:
            return item
        if type(item) is not dict or not item or depth > MOST_DEPTH:
            raise damaged("a value of no kind")
        key, *more = item
        value = item[key]
        if more != _MORE_KEYS.get(key, []):
            raise damaged("a value with unknown keys")
        if key in AS_LISTS:
            return self._sequence(key, value, depth)
        if key == "by_id":
            return ById(self.decode(value, depth + 1))
        if key == "given":
            if type(value) is not int or not 0 <= value < len(self.given):
                raise damaged("an argument that was not given")
            return ById(self.given[value])
        if key == "enum":
            return self._member(value, item["member"])
        if key == "name":
            return self._find(value)
        if key == "array":
            return _array(value, item["dtype"], item["shape"], item["scalar"])
        read = _READERS.get(key)
        try:
            if read is not None and type(value) is _WRITTEN_AS.get(key, str):
                return read(value)
        except (ValueError, TypeError, KeyError, OverflowError):
            pass
        raise damaged(f"no {str(key)[:40]}")

    def _sequence(self, key: str, value: Any, depth: int) -> Any:
        if type(value) is not list:
            raise damaged(f"a {key} without a list")
        parts = [self.decode(part, depth + 1) for part in value]
        try:
            if key != "size" or all(type(part) is int for part in parts):
                return AS_LISTS[key](parts)
        except (TypeError, OverflowError, RuntimeError):
            pass
        raise damaged(f"a {key} of what it cannot hold")

    def _find(self, name: Any) -> Any:
        if type(name) is not str:
            raise damaged("a name that is no text")
        if name not in self._found:
            self._found[name] = self.known.find(name)
        if self._found[name] is None:
            raise unknown_class(name)
        return self._found[name]

    def _member(self, name: Any, member: Any) -> Any:
        kind = self._find(name)
        if not isinstance(kind, type) or not issubclass(kind, enum.Enum) or type(member) is not str:
            raise damaged("a member of what is no enum")
        if member not in kind._member_map_:
            raise damaged(f"{kind.__qualname__} has no member {member[:40]}")
        return kind._member_map_[member]


def unknown_class(name: str, ranks: str = "this rank") -> RecordError:
    """Returns the error where another rank names what `ranks` do not know."""
    module, _, path = name[:200].partition(":")
    path = path or module
    return RecordError(
        f"{path} (of {module}) is not known on {ranks}.",
        why="another rank has an object of it, in a batch or from a module that it ran; a rank makes only objects of\n"
        "classes that its own program names or has used.",
        hint=f"name it in the program, on every rank: from {module} import {path.partition('.')[0]}",
    )


def decode_metas(metas: Any) -> tuple[Meta, ...]:
    if not isinstance(metas, list):
        raise damaged("tensors without a list")
    return tuple([_decode_meta(item) for item in metas])


def _decode_meta(item: Any) -> Meta:
    if not isinstance(item, list) or len(item) != 5:
        raise damaged("a tensor without a shape")
    shape, stride, dtype, device, requires_grad = item
    found = _OF_TORCH.get(dtype) if isinstance(dtype, str) else None
    if type(found) is not torch.dtype or type(requires_grad) is not bool:
        raise damaged("a tensor without a dtype")
    if not _are_sizes(shape) or not _are_sizes(stride) or len(stride) not in (0, len(shape)):
        raise damaged("a tensor whose shape is none")
    if max(math.prod(shape), _span(shape, stride)) * found.itemsize >= 1 << 63:
        raise damaged("a tensor of more bytes than there can be")
    return intern(Meta(tuple(shape), tuple(stride), found, _device_of(device), requires_grad))


def _are_sizes(item: Any) -> bool:
    is_list = isinstance(item, list) and len(item) <= _MOST_DIMENSIONS
    return is_list and all(type(size) is int and 0 <= size < 1 << 63 for size in item)


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=False)) if math.prod(shape) else 0


def _device_of(name: Any) -> torch.device:
    try:
        if isinstance(name, str) and _DEVICE.fullmatch(name):
            return torch.device(name)
    except RuntimeError:  # there is no such device
        pass
    raise damaged(f"there is no device {str(name)[:40]}")


def _array(data: Any, dtype: Any, shape: Any, is_scalar: Any) -> Any:
    try:
        if type(data) is str and type(dtype) is str and ARRAY_TYPE.fullmatch(dtype) and _are_sizes(shape):
            kind, raw = np.dtype(dtype), base64.b64decode(data, validate=True)
            if len(raw) == math.prod(shape) * kind.itemsize and type(is_scalar) is bool and not (is_scalar and shape):
                array = np.frombuffer(raw, kind, count=math.prod(shape)) if raw else np.empty(0, kind)
                array = array.reshape(shape).copy() if raw or not is_scalar else np.zeros(shape, kind)
                return array[()] if is_scalar else array
    except (ValueError, TypeError, OverflowError):
        pass
    raise damaged("an array of another size than its shape")


def _read_range(value: list[Any]) -> range:
    if not all(type(number) is int for number in value):
        raise TypeError
    return range(*value)


_MORE_KEYS = {"enum": ["member"], "array": ["dtype", "shape", "scalar"]}
_WRITTEN_AS: dict[str, type] = {"range": list}
_READERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": complex,
    "bytes": lambda value: base64.b64decode(value, validate=True),
    "range": _read_range,
    "torch": _OF_TORCH.__getitem__,
    "device": _device_of,
    "unnamed": UNNAMED.__getitem__,
    "builtin": {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}.__getitem__,
}

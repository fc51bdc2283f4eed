"""Writes what a program keeps beside its tensors as JSON: nothing in it is ever called or looked up when it is read.

    None, bool, int, float, str, list, dict of texts    as they are
    everything else that can be saved                   {"$tuple": [...]}, {"$tensor": "extra/mask"}, ...

Tensors are stored apart, by name. What is not in this table is refused before anything is written.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from farspan.documents import MAX_DEPTH
from farspan.errors import CheckpointError, quoted
from farspan.record.ops.overrides import read_data
from farspan.state.format.dtypes import ITEM_BYTES

__all__ = ["decode", "dtype_name", "encode", "torch_dtype"]

_MAX_DEPTH = MAX_DEPTH - 8
"""Brackets of JSON in each other: `documents` reads so many, of which others stand around a value."""
_HINT = "numbers, texts, lists, dictionaries, tensors, arrays, or an object with state_dict() and load_state_dict()"
_NUMPY_KINDS = "biufc"
_SCALARS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FACTORIES: dict[str, Callable[[], Any]] = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, set)}
"""What makes the values that a `defaultdict` does not have yet."""
_FLOATS = ("float16", "float32", "float64", "complex64", "complex128")


def encode(value: Any, name: str, put: Callable[[str, torch.Tensor], None], depth: int = 0) -> Any:
    """`value` as JSON has it.

    Args:
        value: Anything that the table has.
        name: Of it, for people and for the tensors in it.
        put: Called for each tensor, with its name.
        depth: Brackets around it.

    Raises:
        CheckpointError: It has something in it that cannot be saved; names it.
    """
    if depth > _MAX_DEPTH:
        why = f"at most {_MAX_DEPTH} brackets in each other; a tuple has two."
        raise CheckpointError(f"{name} is nested too deeply.", why=why, hint="flatten it")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        if value.bit_length() > 130:
            return {"$int": hex(value)}
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is str:
        return _text(value, name)
    if isinstance(value, torch.Tensor):
        _put_tensor(value, name, put)
        return {"$tensor": name}

    def items(found: Any, brackets: int = 2) -> list[Any]:
        return [encode(item, f"{name}/{number}", put, depth + brackets) for number, item in enumerate(found)]

    def pairs(brackets: int = 3) -> list[Any]:
        keys = [encode(key, f"{name}, a key", _refuse_tensor, depth + brackets) for key in value]
        named = [f"{name}/{_shown(key)}" for key in value]
        return [
            [key, encode(item, at, put, depth + brackets)]
            for key, at, item in zip(keys, named, value.values(), strict=True)
        ]

    if kind is list:
        return items(value, 1)
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {_text(key, name): encode(item, f"{name}/{key}", put, depth + 1) for key, item in value.items()}
        return {"$dict": pairs()}
    if kind in (tuple, torch.Size):
        return {"$tuple": items(value)}
    if kind in (set, frozenset):
        return {f"${kind.__name__}": items(sorted(value, key=lambda item: (type(item).__name__, item)))}
    if kind is deque:
        return {"$deque": [value.maxlen, items(value, 3)]}
    if kind in (OrderedDict, Counter):
        return {f"${kind.__name__}": pairs()}
    if kind is defaultdict and (value.default_factory is None or value.default_factory in _FACTORIES.values()):
        factory = value.default_factory
        return {"$defaultdict": ["" if factory is None else factory.__name__, {"$dict": pairs(5)}]}
    if kind in (bytes, bytearray):
        return {"$bytes": bytes(value).hex()}
    if kind is complex:
        return {"$complex": [encode(value.real, name, put), encode(value.imag, name, put)]}
    if kind is torch.dtype:
        return {"$dtype": dtype_name(value)}
    if kind is torch.device:
        return {"$device": str(value)}
    if kind is np.ndarray and value.dtype.kind in _NUMPY_KINDS and value.dtype.name in _SCALARS + _FLOATS:
        put(name, torch.from_numpy(np.array(value, order="C")))
        return {"$array": name}
    if isinstance(value, np.generic) and value.dtype.name in _SCALARS + _FLOATS:
        return {"$scalar": [value.dtype.name, value.tobytes().hex()]}
    raise CheckpointError(
        f"{name} cannot be saved: it is a {kind.__module__}.{kind.__qualname__}.",
        why="a checkpoint holds data alone: nothing is pickled.",
        hint=_HINT,
    )


def decode(value: Any, tensor_of: Callable[[str], torch.Tensor], where: str) -> Any:
    """Returns what `encode` was given.

    Raises:
        CheckpointError: It is nothing that `encode` gives.
    """
    if isinstance(value, list):
        return [decode(item, tensor_of, where) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(item, tensor_of, where) for key, item in value.items()}
    body = value[tag]
    try:
        return _decode_tagged(tag, body, tensor_of, where)
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{where} has something else than was saved: {quoted(body)}.", why=text[:200]) from None


def _decode_tagged(tag: str, body: Any, tensor_of: Callable[[str], torch.Tensor], where: str) -> Any:
    def pairs() -> list[tuple[Any, Any]]:
        return [(decode(key, tensor_of, where), decode(item, tensor_of, where)) for key, item in body]

    match tag:
        case "$tensor":
            return tensor_of(body)
        case "$array":
            return tensor_of(body).numpy()
        case "$tuple" | "$set" | "$frozenset":
            kinds: dict[str, Callable[[Any], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
            return kinds[tag](decode(body, tensor_of, where))
        case "$dict":
            return dict(pairs())
        case "$OrderedDict":
            return OrderedDict(pairs())
        case "$defaultdict":
            return defaultdict(_FACTORIES[body[0]] if body[0] else None, decode(body[1], tensor_of, where))
        case "$Counter":
            return Counter(dict(pairs()))
        case "$deque":
            return deque(decode(body[1], tensor_of, where), maxlen=body[0])
        case "$float":
            return float(body)
        case "$int":
            return int(body, 16)
        case "$bytes":
            return bytes.fromhex(body)
        case "$complex":
            return complex(*[decode(item, tensor_of, where) for item in body])
        case "$dtype":
            return torch_dtype(body)
        case "$device":
            return torch.device(body)
        case "$scalar":
            name, data = body
            if name not in _SCALARS + _FLOATS:
                raise ValueError(name)
            return np.frombuffer(bytes.fromhex(data), dtype=name)[0]
        case _:
            raise ValueError(tag)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Returns the dtype that has a name that a checkpoint may have."""
    if name not in ITEM_BYTES:
        raise ValueError(name)
    return getattr(torch, name)


def _put_tensor(value: torch.Tensor, name: str, put: Callable[[str, torch.Tensor], None]) -> None:
    if value.layout is not torch.strided or value.is_quantized or dtype_name(value.dtype) not in ITEM_BYTES:
        what = f"{value.layout} {dtype_name(value.dtype)}".replace("torch.", "")
        raise CheckpointError(f"{name} cannot be saved: it is a {what} tensor.", hint="a dense tensor")
    put(name, read_data(value))


def _refuse_tensor(name: str, tensor: torch.Tensor) -> None:
    raise CheckpointError(f"{name}, cannot be saved: it is a tensor.", hint="a text or a number for a key")


def _text(value: str, name: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{name} cannot be saved: its text has half a character.", hint="valid Unicode") from None
    return value


def _shown(key: Any) -> str:
    return key if type(key) is str else repr(key)[:40]

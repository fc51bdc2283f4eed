"""Entries as JSON: what the rank that has run a call, or has read a batch, tells the others about it.

Nothing is unpickled or imported: classes and functions are named, and must be loaded under that name already; what the
call was given is named by its place among the arguments.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from farspan.errors import RecordError
from farspan.graph import Meta
from farspan.lazy.metadata.entry import Entry, intern
from farspan.lazy.metadata.template import ById

__all__ = ["entry_from_json", "entry_to_json", "structure_from_json", "structure_to_json"]

_FIELDS = tuple(item.name for item in dataclasses.fields(Entry) if item.init and item.name not in ("metas", "draws"))
_PLAIN = (bool, int, str, type(None))
_TORCH_NAMES = (torch.dtype, torch.layout, torch.memory_format)
_UNNAMED = {
    kind.__name__: kind
    for kind in (
        type(None), type(Ellipsis), type(NotImplemented), types.FunctionType, types.BuiltinFunctionType,
        types.MethodType, types.ModuleType,
    )
}  # fmt: skip
"""Classes that are not found under their own names."""
_AS_LISTS: dict[str, type] = {"tuple": tuple, "frozenset": frozenset, "size": torch.Size}


def entry_to_json(entry: Entry, arguments: Any) -> bytes:
    """Write `entry`.

    Args:
        entry: What a run of a call has shown.
        arguments: The template of the call's arguments; what it holds by identity, the reader has as well.

    Raises:
        RecordError: The result holds an object that has no name.
    """
    given = {id(item): number for number, item in enumerate(_identities(arguments))}
    document = {name: _encode(getattr(entry, name), given) for name in _FIELDS}
    document["metas"] = _encode_metas(entry.metas)
    return json.dumps(document).encode()


def entry_from_json(text: bytes, arguments: Any) -> Entry:
    """Read what `entry_to_json` wrote; `arguments` is the template of this rank's arguments of the same call."""
    given = list(_identities(arguments))
    document = json.loads(text)
    fields = {name: _decode(document[name], given) for name in _FIELDS}
    fields["metas"] = _decode_metas(document["metas"])
    return Entry(**fields)


def structure_to_json(template: Any, metas: Sequence[Meta]) -> bytes:
    """Write an object graph without its tensors' data.

    Raises:
        RecordError: It holds an object that has no name.
    """
    return json.dumps([_encode(template, {}), _encode_metas(metas)]).encode()


def structure_from_json(text: bytes) -> tuple[Any, tuple[Meta, ...]]:
    """Read what `structure_to_json` wrote: the template and its tensors' metadata."""
    template, metas = json.loads(text)
    return _decode(template, []), _decode_metas(metas)


def _encode_metas(metas: Sequence[Meta]) -> list[Any]:
    return [
        [list(meta.shape), list(meta.stride), str(meta.dtype)[6:], str(meta.device), meta.requires_grad]
        for meta in metas
    ]


def _decode_metas(metas: list[Any]) -> tuple[Meta, ...]:
    return tuple(
        intern(Meta(tuple(shape), tuple(stride), getattr(torch, dtype), torch.device(device), requires_grad))
        for shape, stride, dtype, device, requires_grad in metas
    )


def _identities(template: Any) -> Iterator[Any]:
    """What a template holds by identity, in order."""
    if isinstance(template, ById):
        yield template.value
    elif isinstance(template, tuple):
        for part in template:
            yield from _identities(part)


def _encode(item: Any, given: dict[int, int]) -> Any:
    kind = type(item)
    if kind in _PLAIN:
        return item
    for name, sequence in _AS_LISTS.items():
        if kind is sequence:
            return {name: [_encode(part, given) for part in item]}
    if kind is ById:
        if id(item.value) in given:
            return {"given": given[id(item.value)]}
        return {"by_id": _encode(item.value, given)}
    if kind in (float, complex):
        return {kind.__name__: repr(item)}
    if kind is bytes:
        return {"bytes": base64.b64encode(item).decode()}
    if kind is range:
        return {"range": [item.start, item.stop, item.step]}
    if kind in _TORCH_NAMES:
        return {"torch": str(item).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(item)}
    if isinstance(item, enum.Enum):
        return {"enum": _name_of(kind), "member": item.name}
    if kind is type and _UNNAMED.get(item.__name__) is item:
        return {"unnamed": item.__name__}
    if item is Ellipsis or item is NotImplemented:
        return {"builtin": repr(item)}
    if isinstance(item, (np.ndarray, np.generic)) and not item.dtype.hasobject:
        data = base64.b64encode(np.ascontiguousarray(item).tobytes()).decode()
        return {"array": data, "dtype": item.dtype.str, "shape": list(item.shape), "scalar": kind is not np.ndarray}
    return {"name": _name_of(item)}


def _decode(item: Any, given: list[Any]) -> Any:
    if not isinstance(item, dict):
        return item
    key, value = next(iter(item.items()))
    if key in _AS_LISTS:
        return _AS_LISTS[key](_decode(part, given) for part in value)
    if key == "given":
        return ById(given[value])
    if key == "by_id":
        return ById(_decode(value, given))
    if key in ("float", "complex"):
        return float(value) if key == "float" else complex(value)
    if key == "bytes":
        return base64.b64decode(value)
    if key == "range":
        return range(*value)
    if key == "torch":
        return getattr(torch, value)
    if key == "device":
        return torch.device(value)
    if key == "enum":
        return _find(value)[item["member"]]
    if key == "unnamed":
        return _UNNAMED[value]
    if key == "builtin":
        return {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}[value]
    if key == "array":
        array = np.frombuffer(base64.b64decode(value), np.dtype(item["dtype"])).reshape(item["shape"]).copy()
        return array[()] if item["scalar"] else array
    return _find(value)


def _name_of(item: Any) -> str:
    name = f"{getattr(item, '__module__', None)}:{getattr(item, '__qualname__', None)}"
    if _lookup(name) is not item:
        raise RecordError(
            f"a module returned an object that cannot be told to the other ranks: {type(item).__qualname__}.",
            why="what it returns depends on the data, so only the rank that ran it knows it.",
            hint="return tensors, numbers, strings, or lists, dictionaries and objects made of them",
        )
    return name


def _find(name: str) -> Any:
    found = _lookup(name)
    if found is None:
        raise RecordError(
            f"{name} is not loaded on this rank.",
            why="another rank has an object of it, in a batch or from a module that it ran.",
            hint="import it at the top of the program, so that every rank has it",
        )
    return found


def _lookup(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found

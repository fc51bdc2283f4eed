"""Entries as JSON: what the rank that has run a call, or has read a batch, sends the others about it.

Nothing is unpickled, imported or searched for among what is loaded: classes and functions are named, and looked up in
what this rank's own program has used or names (`Known`); what the call was given is named by its place among the
arguments. All is checked before anything is made of it, and whatever is wrong is a RecordError.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from farspan.call.infer.entry import Entry
from farspan.call.pytree.by_id import ById
from farspan.call.pytree.construction import note_used
from farspan.call.side_effects.changes import ATTRIBUTES
from farspan.call.wire.checked import Checker, damaged, is_tuple_of, nodes_of
from farspan.call.wire.decoder import (  # fmt: skip
    ARRAY_TYPE,
    AS_LISTS,
    MOST_DEPTH,
    TORCH_NAMES,
    UNNAMED,
    Decoder,
    decode_metas,
)
from farspan.call.wire.known_classes import Known, is_fixed, name_of
from farspan.errors import RecordError
from farspan.graph import Meta

if TYPE_CHECKING:
    from farspan.call.leaf import Target
    from farspan.graph import Template

__all__ = [
    "NotPlainError",
    "entry_from_json",
    "entry_to_json",
    "names_in",
    "structure_from_json",
    "structure_to_json",
    "unknown_names",
]

_FIELDS = tuple(item.name for item in dataclasses.fields(Entry) if item.init and item.name not in ("metas", "draws"))
_PLAIN = (bool, int, str, type(None))
_NAMES = re.compile(rb'\{"(?:name": "([^"\\]{1,1000})"\}|enum": "([^"\\]{1,1000})", "member")')
"""A quotation mark within a text has a backslash before it: only a name can look like this."""


def entry_to_json(entry: Entry, arguments: Any) -> bytes:
    """Write `entry`.

    Args:
        entry: What a run of a call has shown.
        arguments: The template of the call's arguments; what it holds by identity, the reader has as well.

    Raises:
        NotPlainError: The result holds an object that has no name.
    """
    given = {id(item): number for number, item in enumerate(_identities(arguments))}
    document = {name: _encode(getattr(entry, name), given) for name in _FIELDS}
    document["metas"] = _encode_metas(entry.metas)
    return json.dumps(document).encode()


def entry_from_json(text: bytes, arguments: Any, num_arguments: int, target: Target | None = None) -> Entry:
    """Read what `entry_to_json` wrote.

    Args:
        text: From the rank that has run the call.
        arguments: The template of this rank's arguments of the same call.
        num_arguments: How many tensors the call has been given.
        target: What is called, on this rank.

    Raises:
        RecordError: It is no such text, or names what this rank does not have.
    """
    given = list(_identities(arguments))
    document = _parse(text)
    if not isinstance(document, dict) or document.keys() != {*_FIELDS, "metas"}:
        raise damaged("what a call gives, without its parts")
    decoder = Decoder(Known([*_call_of(target), *given]), given)
    fields = {name: decoder.decode(document[name]) for name in _FIELDS}
    metas = fields["metas"] = decode_metas(document["metas"])
    nodes = {**nodes_of(arguments), ATTRIBUTES: (5, 0, dict, (), ())}
    _check_fields(fields, num_arguments)
    checker = Checker(len(metas), decoder.known, nodes)
    checker.check(fields["template"])
    for number, contents in fields["changes"]:
        checker.check_contents(number, contents)
    return Entry(**fields)


def structure_to_json(template: Template, metas: Sequence[Meta]) -> bytes:
    """Write an object graph without its tensors' data.

    Raises:
        NotPlainError: It holds an object that has no name.
    """
    return json.dumps([_encode(template, None), _encode_metas(metas)]).encode()


def structure_from_json(text: bytes) -> tuple[Any, tuple[Meta, ...]]:
    """Read what `structure_to_json` wrote: the template and its tensors' metadata.

    Raises:
        RecordError: It is no such text, or names what this rank's program does not.
    """
    document = _parse(text)
    if not isinstance(document, list) or len(document) != 2:
        raise damaged("a batch without a structure")
    decoder = Decoder(Known(), [])
    template, metas = decoder.decode(document[0]), decode_metas(document[1])
    Checker(len(metas), decoder.known).check(template)
    return template, metas


def names_in(text: bytes) -> list[str]:
    """Returns the names, in a text from `entry_to_json` or `structure_to_json`, that not every program has: the same,
    and in the same order, on every rank that has the text.
    """
    found = {(name or of_enum).decode(errors="replace") for name, of_enum in _NAMES.findall(text)}
    return sorted(name for name in found if not is_fixed(name))


def unknown_names(names: Sequence[str], target: Target | None = None) -> list[str]:
    """Returns those of `names` that this rank does not have: neither its program nor the code of `target`. Classes that
    it has count as used from now on.
    """
    known, unknown = Known(_call_of(target)), list[str]()
    for name in names:
        found = known.find(name)
        if isinstance(found, type):
            note_used(found)
        elif found is None:
            unknown.append(name)
    return unknown


def _call_of(target: Target | None) -> list[Any]:
    """Returns what a call is made of: its modules, or its function."""
    return [] if target is None else [*getattr(target, "modules", ()), target]


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text.decode(), parse_constant=_no_constant, parse_float=_no_constant)
    except (ValueError, RecursionError):
        raise damaged("it is no JSON, or nested too deeply") from None


def _no_constant(text: str) -> Any:
    raise ValueError(text)


def _encode_metas(metas: Sequence[Meta]) -> list[Any]:
    return [
        [list(meta.shape), list(meta.stride), str(meta.dtype)[6:], str(meta.device), meta.requires_grad]
        for meta in metas
    ]


_BOOLS = ("names_arguments", "has_tensors_only", "is_one_new_tensor", "is_random", "is_random_in_python", "is_ordered")


def _check_fields(fields: dict[str, Any], num_arguments: int) -> None:
    """Raise if the parts of an entry, templates apart, are not what an entry has."""
    num_metas, kinds = len(fields["metas"]), {**dict.fromkeys(_BOOLS, bool), "name": str, "num_results": int}

    def is_numbers(item: Any, first: int, end: int) -> bool:
        return is_tuple_of(item, int) and all(first <= number < end for number in item)

    wrong = [name for name, kind in kinds.items() if type(fields[name]) is not kind]
    wrong += [name for name in ("flops", "digest") if type(fields[name]) is not int or fields[name].bit_length() > 512]
    if type(fields["unused"]) is not frozenset or not is_numbers(tuple(fields["unused"]), 0, 1 << 32):
        wrong.append("unused")
    wrong += [name for name in ("attributes", "histories") if not is_tuple_of(fields[name], str)]
    wrong += [name for name in ("same_as", "shares") if not is_numbers(fields[name], -1, num_arguments)]
    wrong += [
        name for name, end in (("mutated", num_arguments), ("views", num_metas)) if not is_numbers(fields[name], 0, end)
    ]
    for name, end in (("depends_on", num_arguments), ("parameters", 1 << 32)):
        if not is_tuple_of(fields[name], tuple) or not all(is_numbers(item, 0, end) for item in fields[name]):
            wrong.append(name)
    if type(fields["num_results"]) is int and not 0 <= fields["num_results"] <= num_metas:
        wrong.append("num_results")
    changes = fields["changes"]
    if not is_tuple_of(changes, tuple) or any(len(change) != 2 for change in changes):
        wrong.append("changes")
    if wrong:
        raise damaged(f"what a call gives, with a wrong {wrong[0]}")


def _identities(template: Template) -> Iterator[Any]:
    """Returns what a template holds by identity, in order."""
    if isinstance(template, ById):
        yield template.value
    elif isinstance(template, tuple):
        for part in template:
            yield from _identities(part)


def _encode(item: Any, given: dict[int, int] | None, depth: int = 0) -> Any:
    """`item` as JSON; what is `given`, by id, as its number. Without that, functions cannot be named."""
    kind = type(item)
    if kind in _PLAIN:
        return item
    if depth >= MOST_DEPTH:
        raise _not_plain("an object nested this deeply")
    for name, sequence in AS_LISTS.items():
        if kind is sequence:
            return {name: [_encode(part, given, depth + 1) for part in item]}
    if kind is ById:
        if given is not None and id(item.value) in given:
            return {"given": given[id(item.value)]}
        return {"by_id": _encode(item.value, given, depth + 1)}
    if kind in (float, complex):
        return {kind.__name__: repr(item)}
    if kind is bytes:
        return {"bytes": base64.b64encode(item).decode()}
    if kind is range:
        return {"range": [item.start, item.stop, item.step]}
    if kind in TORCH_NAMES:
        return {"torch": str(item).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(item)}
    if isinstance(item, enum.Enum) and kind._member_map_.get(item.name or "") is item:
        return {"enum": _own_name(kind), "member": item.name}
    if kind is type and UNNAMED.get(item.__name__) is item:
        return {"unnamed": item.__name__}
    if item is Ellipsis or item is NotImplemented:
        return {"builtin": repr(item)}
    if kind in (np.ndarray, np.memmap) or isinstance(item, np.generic):
        return _encode_array(item)
    if given is None and not isinstance(item, type):
        raise _not_plain(kind.__qualname__)
    return {"name": _own_name(item)}


def _encode_array(item: Any) -> Any:
    if item.dtype.hasobject or not ARRAY_TYPE.fullmatch(item.dtype.str) or np.dtype(item.dtype.str) != item.dtype:
        raise _not_plain(type(item).__qualname__)
    data = base64.b64encode(np.ascontiguousarray(item).tobytes()).decode()
    return {"array": data, "dtype": item.dtype.str, "shape": list(item.shape), "scalar": isinstance(item, np.generic)}


def _own_name(item: Any) -> str:
    """Returns the name of a class, function or module of this rank's."""
    name = name_of(item)
    if name is None or _loaded(name) is not item:
        raise _not_plain(type(item).__qualname__)
    return name


def _loaded(name: str) -> Any:
    """Returns what this rank itself has loaded under its own name: only what is to be sent is found like this."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split(".") if path else ():
        found = getattr(found, part, None)
    return found


class NotPlainError(RecordError):
    """An object, of class `kind`, has no name by which another rank would know it."""

    kind: str = ""


def _not_plain(kind: str) -> NotPlainError:
    error = NotPlainError(
        f"a module returned an object that cannot be sent to the other ranks: {kind}.",
        why="what it returns depends on the data, so only the rank that ran it knows it.",
        hint="return tensors, numbers, strings, or lists, dictionaries and objects made of them",
    )
    error.kind = kind
    return error

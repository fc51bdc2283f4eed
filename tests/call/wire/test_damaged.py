"""Texts from other ranks with anything wrong in them: a clean result or the clear error, and nothing is called."""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.call.wire.test_named import CALLED, kinds
from torch import nn

from farspan.call.infer.entry import Entry, meta_of
from farspan.call.infer.observe import Fakes, observe
from farspan.call.modes import current_modes
from farspan.call.pytree.template import flatten, rebuild
from farspan.call.side_effects.changes import apply_result, objects_given, rebuild_arguments
from farspan.call.wire.exceptions import exception_from_json, exception_to_json
from farspan.call.wire.structure import entry_from_json, entry_to_json, structure_from_json, structure_to_json
from farspan.errors import RecordError

_AUDITED = ("os.", "subprocess.", "exec", "compile", "open", "shutil.", "socket.", "ctypes.")
_heard: list[str] | None = None
_is_listening = False


def _listen(event: str, arguments: Any) -> None:
    if _heard is not None and event.startswith(_AUDITED):
        _heard.append(event)


@contextmanager
def nothing_called() -> Iterator[None]:
    """No code of the classes of `test_named`, and nothing that Python audits."""
    global _heard, _is_listening
    if not _is_listening:
        sys.addaudithook(_listen)  # for ever
        _is_listening = True
    CALLED.clear()
    _heard = heard = []
    try:
        yield
    finally:
        _heard = None
    assert not heard and not CALLED, (heard, CALLED)


def trip(*arguments: Any, **named: Any) -> None:
    """In the globals of this program, and nobody's to call."""
    CALLED.append((arguments, named))


class Trip:
    def __new__(cls, *arguments: Any) -> Any:
        CALLED.append(arguments)
        return object.__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        CALLED.append((name, value))

    def __init__(self, *arguments: Any) -> None:
        CALLED.append(arguments)


@functools.cache
def _texts() -> list[Any]:
    found: list[Any] = []
    for item in kinds().values():
        template, tensors = flatten(item)
        found.append(json.loads(structure_to_json(template, list(map(meta_of, tensors)))))
    return found


NAMES = [
    "os:system", "posix:system", "subprocess:Popen", "builtins:eval", "builtins:int", "builtins:dict", "builtins:type",
    "builtins:BaseException", "torch:load", "torch:Tensor", "torch.nn.modules.module:Module", "numpy:ndarray",
    "collections:OrderedDict", "collections:defaultdict", "collections:deque", "types:SimpleNamespace", ":", "a", "",
    f"{__name__}:trip", f"{__name__}:Trip", "tests.call.wire.test_named:Guarded", "torch.return_types:max",
    "tests.call.wire.test_named:Finalized", "tests.call.wire.test_named:Pair", "__main__:main",
    "tests.call.wire.test_named:Colour", "tests.call.wire.test_named:Slotted", "enum:Enum", "pathlib:PosixPath",
]  # fmt: skip
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 12), st.integers(), st.floats(), st.text(max_size=6),
    st.sampled_from([10**400, 2**63, -(2**63), "\udc80", [[]] * 3, {}, {"tuple": []}, {"frozenset": [{"array": ""}]}]),
    st.sampled_from(NAMES).map(lambda name: {"name": name}), st.sampled_from(NAMES), st.just("__class__"),
    st.sampled_from(NAMES).map(lambda name: {"by_id": {"name": name}}), st.just("default_factory"),
    st.sampled_from(["load", "float32", "strided", "hub", "nn", ""]).map(lambda name: {"torch": name}),
    st.sampled_from(["cpu", "cuda:-1", "x", "meta", "cuda:99999999999"]).map(lambda name: {"device": name}),
    st.builds(
        lambda dtype, shape: {"array": "AAAAAAAA", "dtype": dtype, "shape": shape, "scalar": False},
        st.sampled_from(["<i2", "|O", "O", "<i8", "i4,i4", "<M8[ns]", "|V2", "<U1"]),
        st.lists(st.integers(-2, 1 << 40), max_size=3),
    ),
    st.lists(st.integers(-1, 9), max_size=4).map(lambda item: {"range": item}),
    st.sampled_from(["1e5", "nan", "x", "1" * 5000]).map(lambda item: {"float": item}),
    st.integers(0, 11).map(lambda kind: {"tuple": [kind, 0]}),
)  # fmt: skip


def _places(item: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    stack = [item]
    while stack:
        part = stack.pop()
        keys = range(len(part)) if isinstance(part, list) else [*part] if isinstance(part, dict) else []
        found.extend((part, key) for key in keys)
        stack.extend(part[key] for key in keys)
    return found


@st.composite
def mutated(draw: st.DrawFn, texts: list[Any]) -> bytes:
    """A text with one to four parts changed, or bytes."""
    document = copy.deepcopy(draw(st.sampled_from(texts)))
    for _ in range(draw(st.integers(1, 4))):
        places = _places(document)
        if not places:
            break
        part, key = draw(st.sampled_from(places))
        kind = draw(st.integers(0, 5))
        if kind <= 2:
            part[key] = copy.deepcopy(draw(leaves))
        elif kind == 3:
            other, other_key = draw(st.sampled_from(places))
            part[key] = copy.deepcopy(other[other_key])
        elif kind == 4:
            del part[key]
        elif isinstance(part, list):
            part.insert(key, copy.deepcopy(draw(leaves)))
        else:
            part[draw(st.sampled_from(["name", "tuple", "x", "by_id"]))] = copy.deepcopy(draw(leaves))
    text = json.dumps(document).encode()
    at = draw(st.integers(0, len(text)))
    return text[:at] + draw(st.binary(max_size=3)) + text[at:] if draw(st.integers(0, 19)) == 0 else text


EXCEPTIONS = [
    json.loads(exception_to_json(error))
    for error in (ValueError("a", (1, [2])), OSError(2, "b"), ExceptionGroup("c", [KeyError("d")]))
]
SLOW_STARTS = [HealthCheck.too_slow, HealthCheck.data_too_large]


def check_structure(text: bytes) -> None:
    with nothing_called():
        try:
            template, metas = structure_from_json(text)
        except RecordError:
            return
        rebuild(template, [object() for _ in metas])


class Changing(nn.Module):
    def forward(self, items: list[Any], named: dict[str, Any], x: torch.Tensor) -> Any:
        items.append(x * 2)
        named["y"] = [x, items, 3]
        return {"x": (x + 1, named), "n": torch.max(x, 0), "d": torch.float32}


def some_arguments() -> Any:
    return ([1, 2], {"x": None}, torch.ones(2, 3)), {}


def _entry() -> Entry:
    def run(tensors: Any) -> Any:
        args, kwargs, _, arguments = rebuild_arguments(TEMPLATE, tensors)
        return MODULE(*args, **kwargs), arguments

    _, tensors = flatten(some_arguments())
    return observe(MODULE, TEMPLATE, list(map(meta_of, tensors)), current_modes(), tensors, run, Fakes())[0]


MODULE = Changing()
TARGET: Any = SimpleNamespace(modules=[MODULE])
TEMPLATE = flatten(some_arguments())[0]
ENTRY = json.loads(entry_to_json(_entry(), TEMPLATE))


def test_what_a_call_gives_arrives_as_it_was() -> None:
    entry = entry_from_json(json.dumps(ENTRY).encode(), TEMPLATE, 1, TARGET)
    assert entry.digest == _entry().digest and entry.template == _entry().template and entry.changes


@settings(max_examples=300, deadline=None, suppress_health_check=SLOW_STARTS)
@given(mutated([ENTRY]))
def test_a_damaged_result_is_the_clear_error_or_data(text: bytes) -> None:
    with nothing_called():
        try:
            entry = entry_from_json(text, TEMPLATE, 1, TARGET)
        except RecordError:
            return
        apply_result(entry.template, entry.changes, [object() for _ in entry.metas], objects_given(some_arguments()))


@settings(max_examples=300, deadline=None, suppress_health_check=SLOW_STARTS)
@given(st.deferred(lambda: mutated(_texts())))
def test_a_damaged_batch_is_the_clear_error_or_data(text: bytes) -> None:
    check_structure(text)


@pytest.mark.parametrize(
    "ends", [None, 3, {"tuple": [3]}, {"tuple": [3, 3]}, {"tuple": [3, {"tuple": []}]}, {"tuple": [7, 0]}]
)
def test_a_slice_without_three_ends(ends: Any) -> None:
    with pytest.raises(RecordError):
        structure_from_json(json.dumps([{"tuple": [9, ends]}, []]).encode())


@pytest.mark.parametrize("factory", [None, 3, {"tuple": [1]}, {"tuple": []}, {"tuple": [0, 0]}])
def test_a_factory_that_is_no_name(factory: Any) -> None:
    attributes = {"tuple": [{"tuple": ["default_factory", factory]}]}
    text = [{"tuple": [5, 0, {"name": "collections:defaultdict"}, {"tuple": []}, attributes]}, []]
    with pytest.raises(RecordError):
        structure_from_json(json.dumps(text).encode())


@pytest.mark.timeout(1800)
@settings(max_examples=10_000, deadline=None, suppress_health_check=SLOW_STARTS)
@given(st.deferred(lambda: mutated(_texts())))
def test_ten_thousand_damaged_batches(text: bytes) -> None:
    check_structure(text)


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW_STARTS)
@given(mutated(EXCEPTIONS))
def test_a_damaged_exception_is_the_clear_error_or_an_exception(text: bytes) -> None:
    with nothing_called(), suppress(RecordError):
        assert isinstance(exception_from_json(text, []), Exception)


DEEP = [
    b"[" * 100_000,
    json.dumps([{"tuple": [3]}, []]).encode().replace(b"3", b"9" * 10_000),
    b"[" + b'{"tuple": [3, {"tuple": [' * 2_000 + b"]}]}" * 2_000 + b", []]",
    b"",
    b"[NaN, []]",
    b"\xff",
    b"null",
    b'[{"tuple": [0, 0]}, [[[9223372036854775807, 9223372036854775807], [1, 1], "float32", "cpu", false]]]',
    b'[{"tuple": [0, 0]}, [[[2], [1], "nn", "cpu", false]]]',
    b'[{"tuple": [0, 1]}, [[[2], [1], "float32", "cpu", false]]]',
    b'[{"tuple": [0, -1]}, [[[2], [1], "float32", "cpu", false]]]',
    b'[{"tuple": [0, 0]}, [[[-2], [1], "float32", "cpu", false]]]',
    b'[{"tuple": [0, 0]}, [[[2], [1], "float32", "cuda:x", false]]]',
]


@pytest.mark.parametrize("text", DEEP, ids=lambda text: text[:20].decode(errors="replace"))
def test_depth_and_sizes_are_bounded(text: bytes) -> None:
    with pytest.raises(RecordError, match="cannot be read"):
        structure_from_json(text)

"""Templates: any object graph with tensors in it, and back again."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from farspan.call.pytree.canonical import canonical
from farspan.call.pytree.template import flatten, flatten_arguments, map_tensors, rebuild, shape_of_call


class Pair(NamedTuple):
    left: Any
    right: int


@dataclass
class Record:
    tensor: Any
    note: str


@dataclass(frozen=True, slots=True)
class Slotted:
    tensor: Any
    number: int = 3


class Colour(enum.Enum):
    RED = 1


class Cache:
    """As transformers' DynamicCache: an object with lists of tensors."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.length = 0


A, B = torch.zeros(2), torch.ones(3)


@pytest.mark.parametrize(
    "item",
    [
        A,
        None,
        (A, B, 3, 2.5, True, "word", None),
        [A, [B, {"x": A}]],
        {"a": A, 1: B},
        OrderedDict(b=A, a=B),
        Pair(A, 1),
        Record(A, "hi"),
        Slotted(B),
        slice(1, None),
        {1, 2},
        Colour.RED,
        torch.float32,
        torch.Size([2, 3]),
        (A, A),
    ],
    ids=str,
)
def test_rebuilding_gives_an_equal_object(item: Any) -> None:
    template, tensors = flatten(item)
    assert hash(template) == hash(flatten(item)[0])
    assert template == flatten(item)[0]
    again = rebuild(template, tensors)
    assert type(again) is type(item)
    assert flatten(again)[0] == template
    assert all(left is right for left, right in zip(flatten(again)[1], tensors, strict=True))


def test_sizes_are_in_the_shape_of_a_call_and_nothing_else_in_tuples_is() -> None:
    x, found = torch.zeros(2, 2), list[Any]()
    assert shape_of_call((x, (1, 4)), {}, found) == shape_of_call((x, (1, 4)), {}, [])
    assert len(found) == 1 and found[0] is x
    assert shape_of_call((x, (1, 4)), {}, []) != shape_of_call((x, (4, 1)), {}, [])
    for other in ([1, 4], (True, 4), (1.0, 4), (x, 4), ((1,), 4)):
        assert shape_of_call((x, other), {}, []) is None


def test_one_and_true_and_one_point_zero_are_different_templates() -> None:
    assert len({flatten(value)[0] for value in (1, True, 1.0)}) == 3


@pytest.mark.parametrize(
    ("number", "other", "are_same"),
    [(-0.0, 0.0, False), (-0.0, -0.0, True), (float("nan"), float("nan"), True), (complex(0, -0.0), 0j, False)],
)
def test_numbers_are_the_same_in_templates_if_their_bits_are(number: Any, other: Any, are_same: bool) -> None:
    x = torch.ones(2)
    one, another = flatten_arguments((x, number), {}), flatten_arguments((x, other), {})
    assert (one[0] == another[0]) == are_same == (flatten(([number],))[0] == flatten(([other],))[0])
    assert (shape_of_call((x, number), {}, []) == shape_of_call((x, other), {}, [])) == are_same
    assert (canonical(one[0]) == canonical(another[0])) == are_same
    assert repr(rebuild(one[0], [x])[0][1]) == repr(number)


def test_a_tensor_that_appears_twice_is_one_slot() -> None:
    template, tensors = flatten([A, {"again": A}, B])
    assert [tensor is A for tensor in tensors] == [True, False]
    again = rebuild(template, ["x", "y"])
    assert again == ["x", {"again": "x"}, "y"]


def test_an_object_that_appears_twice_is_one_object_again() -> None:
    cache = Cache()
    cache.keys.append(A)
    first, second = rebuild(*flatten((cache, cache)))
    assert first is second and first is not cache and first.keys is not cache.keys
    assert first.keys[0] is A


def test_a_circle_is_rebuilt() -> None:
    ring: list[Any] = [A]
    ring.append(ring)
    again = rebuild(*flatten(ring))
    assert again[1] is again


def test_a_default_dictionary_keeps_its_factory() -> None:
    table: defaultdict[str, list[Any]] = defaultdict(list)
    table["x"].append(A)
    again = rebuild(*flatten(table))
    assert type(again) is defaultdict and again["x"][0] is A
    assert again["new"] == []


def test_torch_return_types_come_back() -> None:
    result = torch.max(torch.eye(3), 0)
    again = rebuild(*flatten(result))
    assert type(again) is type(result) and torch.equal(again.values, result.values)


def test_modules_functions_and_arrays_are_taken_by_identity() -> None:
    module, array = nn.Linear(1, 1), np.zeros(3)
    again = rebuild(*flatten((module, torch.relu, array)))
    assert again[0] is module and again[1] is torch.relu and again[2] is array


def test_mapping_tensors_copies_the_containers() -> None:
    item = {"x": [A]}
    again = map_tensors(item, lambda tensor: tensor + 1)
    assert torch.equal(again["x"][0], A + 1) and item["x"][0] is A

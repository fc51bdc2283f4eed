"""What a program keeps beside tensors comes back as it was, or is refused before anything is written."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import farspan
from farspan.errors import CheckpointError
from farspan.state.values import decode, encode


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, "extra", tensors.__setitem__), allow_nan=False)
    return decode(json.loads(text), tensors.__getitem__, "a checkpoint")


def test_values_come_back_with_their_types() -> None:
    value = {
        "plain": [None, True, 3, -2.5, "text \N{SNOWMAN}", {"nested": []}],
        "numbers": [math.inf, 1e-310, 2**200, 1 + 2j],
        "kinds": [(1, (2,)), {1, 2}, frozenset({"a"}), b"\x00\xff", deque([1, 2], maxlen=4), torch.Size([2, 3])],
        "dicts": [{1: "a", (2, 3): None}, {"$tensor": 1}, OrderedDict(a=1), Counter("aab")],
        "torch": [torch.float16, torch.device("cpu")],
        "numpy": [np.float32(0.1), np.int64(7)],
    }
    found = there_and_back(value)
    assert found == value
    assert [type(item) for item in found["kinds"]] == [tuple, set, frozenset, bytes, deque, tuple]
    assert [type(item) for item in found["dicts"]] == [dict, dict, OrderedDict, Counter]
    assert found["kinds"][4].maxlen == 4 and type(found["numpy"][0]) is np.float32
    counts = there_and_back(defaultdict(int, a=1))
    counts["b"] += 1  # it came back as a plain dictionary
    assert counts == {"a": 1, "b": 1} and there_and_back(defaultdict(None, a=1)).default_factory is None
    assert math.isnan(there_and_back(math.nan))


def test_tensors_and_arrays_come_back() -> None:
    tensor, array = torch.arange(4, dtype=torch.bfloat16), np.eye(2)
    found = there_and_back({"a": [tensor], "b": array})
    assert torch.equal(found["a"][0], tensor) and np.array_equal(found["b"], array)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: {"a": [print]}, "extra/a/0"),
        (lambda: {"a": torch.eye(3).to_sparse()}, "extra/a"),
        (lambda: object(), "extra"),
        (lambda: defaultdict(lambda: 1), "extra"),
        (lambda: {"a": "\ud800"}, "extra/a"),
        (lambda: {"a": np.array(["text"])}, "extra/a"),
    ],
)
def test_what_cannot_be_saved_is_named(make: Callable[[], Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} cannot be saved"):
        there_and_back(make())


@pytest.mark.parametrize("value", [{"$eval": "1"}, {"$dtype": "load"}, {"$scalar": ["object", ""]}, {"$tuple": 3}])
def test_nothing_is_looked_up_that_is_not_in_the_table(value: Any) -> None:
    with pytest.raises(CheckpointError):
        decode(value, lambda name: torch.empty(0), "a checkpoint")


def is_taken(value: Any) -> bool:
    try:
        encode(value, "extra", lambda name, tensor: None)
    except CheckpointError as error:
        return "nested too deeply" not in str(error)
    return True


@pytest.mark.parametrize(
    "around",
    [
        lambda value: [value],
        lambda value: (value,),
        lambda value: {"a": value},
        lambda value: {1: value},
        lambda value: deque([value]),
        lambda value: defaultdict(list, a=value),
        lambda value: frozenset([value]),
    ],
)
def test_as_deep_as_it_may_be_it_can_be_read_again(around: Callable[[Any], Any], tmp_path: Path) -> None:
    """Levels of the program's were counted, and brackets when it was read: tuples in tuples could not be loaded."""
    values: list[Any] = [1]
    while is_taken({"mine": values[-1]}):
        values.append(around(values[-1]))
    last = values[-2]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["mine"] = last
    farspan.save(tmp_path, model=model, optimizer={"a": optimizer}, extra={"a": last}, wait=True)
    assert farspan.load(tmp_path).extra == {"a": last}

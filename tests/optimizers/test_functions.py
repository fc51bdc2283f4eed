"""Calls of an optimizer's step are told apart by all that their results depend on, and by nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farspan.call.pytree.template import flatten_arguments
from farspan.execute.optimizers.functions import _written_lists, kind_of_call, shape_of

X, Y = torch.ones(2), torch.ones(3)
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((X, 0.5), {}),
    ((X, 0.25), {}),
    ((X, 1), {}),
    ((X, True), {}),
    ((X, 2), {}),
    ((0.5, X), {}),
    ((X, Y), {}),
    ((X, Y), {"value": 0.1}),
    ((X, Y), {"value": 0.2}),
    ((X,), {"other": Y, "alpha": 0.1}),
    ((X,), {"alpha": 0.1, "other": Y}),
    ((X, torch.float32), {}),
    ((X, torch.float64), {}),
    ((X, None), {}),
]


def test_the_short_way_tells_apart_what_the_long_one_does() -> None:
    short = [kind_of_call(args, kwargs, []) for args, kwargs in CALLS]
    long = [shape_of(flatten_arguments(args, kwargs)[0]) for args, kwargs in CALLS]
    for one in range(len(CALLS)):
        for other in range(len(CALLS)):
            assert (short[one] == short[other]) == (long[one] == long[other]), (CALLS[one], CALLS[other])


def test_its_tensors_are_those_of_the_template() -> None:
    for args, kwargs in CALLS:
        tensors: list[Any] = []
        kind_of_call(args, kwargs, tensors)
        assert list(map(id, tensors)) == list(map(id, flatten_arguments(args, kwargs)[1]))


@pytest.mark.parametrize("args", [(X, X), ([X], Y), (X, slice(1))])
def test_other_calls_take_the_long_way(args: tuple[Any, ...]) -> None:
    tensors: list[Any] = []
    assert kind_of_call(args, {}, tensors) is None
    assert tensors == []


IN_PLACE = [name for name in dir(torch.ops.aten) if name.startswith(("_foreach_", "_fused_")) and name.endswith("_")]


@pytest.mark.parametrize(
    "name", sorted({*IN_PLACE, "_foreach_sqrt_", "_foreach_lerp_", "_foreach_copy_", "_fused_sgd_"})
)
def test_of_each_function_over_lists_it_is_known_into_which_it_writes(name: str) -> None:
    written = _written_lists(name)
    assert written[:1] == (0,)
    assert len(written) == 1 or name.startswith("_fused_")

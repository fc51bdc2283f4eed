"""Which calls of functions are looked at: those that are given a placed tensor, wherever among their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from farspan.record.intercept import _concerns

WAYS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "itself": lambda tensor: ((tensor,), None),
    "by name": lambda tensor: ((), {"weight": tensor}),
    "in a list": lambda tensor: (([torch.ones(1), tensor],), {}),
    "in a dictionary": lambda tensor: (({"a": 1, "b": tensor},), {}),
    "in a dictionary by name": lambda tensor: ((), {"state": {"b": (tensor,)}}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_placed_tensor_is_found_wherever_it_is_given(way: str) -> None:
    tensor, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert _concerns(*WAYS[way](tensor), {id(tensor): None})
    assert not _concerns(*WAYS[way](tensor), {id(other): None})

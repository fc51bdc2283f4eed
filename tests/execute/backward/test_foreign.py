"""The tensors that a call was given, as a backward that runs its code again finds them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from farspan.execute.backward.around import _tensor_of
from farspan.graph import Value


def test_a_value_is_its_leaf_in_the_segment_or_its_data_and_a_tensor_is_itself() -> None:
    value, other = Value.__new__(Value), Value.__new__(Value)
    value.data = other.data = torch.zeros(1)
    leaf, parameter = torch.zeros(1), torch.nn.Parameter(torch.zeros(1))
    segment: Any = SimpleNamespace(leaves={value: leaf})
    assert _tensor_of(value, segment) is leaf
    assert _tensor_of(other, segment) is other.data
    for where in (segment, None):
        assert _tensor_of(parameter, where) is parameter
    assert _tensor_of(value, None) is value

"""Which classes every rank has, whatever its program names."""

from __future__ import annotations

import pathlib
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from farspan.call.wire.known_classes import Known, is_fixed, name_of

KINDS = [
    Counter, OrderedDict, UserDict, UserList, defaultdict, deque, SimpleNamespace, dict, slice, np.int64, torch.Size,
    torch.Tensor, torch.nn.Parameter, torch.return_types.max, pathlib.PurePath,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_classes_of_python_and_torch_that_keep_data_are_known_without_a_search(kind: Any) -> None:
    name = name_of(kind)
    assert name is not None and is_fixed(name)
    assert Known().find(name) is kind

"""What ranks compare in each agreement: checksums of data, states of generators, and what is said of calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from farspan.call.pytree.template import flatten
from farspan.execute.agreement.checksum import checksum_of
from farspan.execute.agreement.history import _circumstances
from farspan.execute.agreement.shared_generators import generator_states

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (40, 50)])
def test_data_of_any_type_have_a_checksum_that_other_data_have_not(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    first, other = (torch.randint(0, 2, shape, generator=generator).to(dtype) for _ in range(2))
    assert checksum_of(first) == checksum_of(first.clone())
    assert checksum_of(first) != checksum_of(other)
    assert checksum_of(first.t().contiguous().t() if first.dim() == 2 else first) == checksum_of(first)


DRAWS: dict[str, tuple[int, Callable[[], object]]] = {
    "torch": (0, lambda: torch.rand(1)),
    "half a pair of normal numbers of torch": (0, lambda: torch.randn(1)),
    "random": (1, random.random),
    "numpy": (2, lambda: np.random.random()),
}


@pytest.mark.parametrize("name", DRAWS)
def test_one_draw_is_seen_in_the_state_of_its_generator_and_in_no_other(name: str) -> None:
    number, draw = DRAWS[name]
    for _ in range(3):
        before = generator_states()
        assert generator_states() == before
        draw()
        after = generator_states()
        assert [before[each] != after[each] for each in range(3)] == [each == number for each in range(3)]


def test_what_is_said_of_a_call_names_its_plain_values_and_its_modes() -> None:
    def said(*args: Any, modes: Any = (), path: Any = None) -> str:
        call: Any = SimpleNamespace(template=flatten((args, {}))[0], target=torch.relu, modes=modes, path=path)
        return _circumstances(call)

    x = torch.ones(2)
    assert said(x) == said(x, modes=(True, False, ())) == ""
    assert said(x, 3, [2.5, "a"]) == " (with 3, 2.5, 'a')"
    assert said(x, modes=(False, False, (("cpu", torch.bfloat16),))) == (
        " (without gradient; autocast to torch.bfloat16)"
    )
    assert said(x, 1, path=(0, 0, 4)) == " (with 1; draw 4 of its kind)"

"""Whether rows of a batch stay apart: what rules say of a model is right by the numbers of a plain run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.call.rows.apart import APART
from tests.call.rows.oracle import verdicts
from tests.call.rows.snippets import Snippet, floats
from tests.call.rows.whole import WHOLE
from torch import Tensor


@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_are_known_to(name: str) -> None:
    forward, make = APART[name]
    found = verdicts(Snippet(forward), make)
    assert "" in found.values(), found


@pytest.mark.parametrize("name", WHOLE)
def test_rows_that_meet_are_never_said_to_be_apart(name: str) -> None:
    forward, make = WHOLE[name]
    found = verdicts(Snippet(forward), make)
    assert all(found.values()), found


_STEPS: list[Callable[[Any, Tensor], Tensor]] = [
    lambda m, x: x @ m.w,
    lambda m, x: m.w @ x,
    lambda m, x: x.transpose(0, 1),
    lambda m, x: x.transpose(1, 2),
    lambda m, x: x.permute(2, 0, 1),
    lambda m, x: x.reshape(-1, 6).tanh().view(x.shape),
    lambda m, x: x.reshape(6, -1).softmax(-1).view(x.shape),
    lambda m, x: x.softmax(1),
    lambda m, x: x.log_softmax(-1),
    lambda m, x: x - x.mean(1, keepdim=True),
    lambda m, x: x - x.amax((0, 2), keepdim=True),
    lambda m, x: x * m.b,
    lambda m, x: x + m.w,
    lambda m, x: x.cumsum(-1),
    lambda m, x: x.flip(0),
    lambda m, x: x.roll(1, 2),
    lambda m, x: x.bmm(x.transpose(1, 2)).bmm(x),
    lambda m, x: F.scaled_dot_product_attention(x, x, x),
    lambda m, x: F.layer_norm(x, x.shape[2:]),
    lambda m, x: torch.stack(x.unbind(1), 2),
    lambda m, x: torch.cat(x.chunk(2, 1), 1),
    lambda m, x: torch.cat([x, x], 0)[: x.shape[0]],
    lambda m, x: x.gather(1, x.argsort(1)),
    lambda m, x: x.masked_fill(x > 1, 0.5),
    lambda m, x: x.sum(0, keepdim=True).expand(x.shape),
    lambda m, x: x.repeat(2, 1, 1).view(2, *x.shape).sum(0),
    lambda m, x: x.sort(-1).values,
    lambda m, x: x.clone().mul_(2),
]


@pytest.mark.parametrize("seed", range(80))
def test_whatever_is_said_of_some_operations_behind_each_other_is_right(seed: int) -> None:
    draw = random.Random(seed)
    steps = draw.choices(_STEPS, k=draw.randint(2, 4))
    ends_in_sum = draw.random() < 0.3

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x * m.b.mean()
        for step in steps:
            x = step(m, x)
        return x.sum() if ends_in_sum else x

    verdicts(Snippet(forward), floats)

"""`print(loss)` shows what it shows in one process: the numbers, and what has made them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.plainly import X, assert_same_as_plainly
from torch import nn


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5), nn.Linear(5, 5))


def shown(model: Any) -> list[str]:
    out = model(X)
    loss = out.pow(2).mean()
    lines = [str(out), str(loss), f"{loss} {loss:.3f} {out[0]}", str([out.sum()]), str(model[0].weight[0])]
    loss.backward()
    lines += [str(loss), str(loss.detach()), str(model[2].bias.grad), str(torch.relu_(out * 2))]
    with torch.no_grad():
        return [*lines, str(model(X))]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_value_is_shown_with_what_has_made_it(num_ranks: int) -> None:
    assert_same_as_plainly(build, shown, num_ranks)

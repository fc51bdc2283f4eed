"""Strides travel with the data: what a kernel adds up in which order depends on them."""

from __future__ import annotations

import torch
from tests.support.plainly import assert_same_as_plainly, train
from torch import Tensor, nn

X = torch.randn(32, 40, 8, generator=torch.Generator().manual_seed(0))


class Transposed(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_in, num_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).transpose(1, 2)


class Mixer(nn.Module):
    """The values at the border are transposed views; the gradients that come back for them are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Transposed(8, 24), Transposed(40, 16), Transposed(24, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_stage_sees_the_strides_that_one_process_sees() -> None:
    plan = {f"layers.{number}": f"rank:{number}" for number in range(3)}
    assert_same_as_plainly(Mixer, lambda model: train(model, X, lambda out: out.square().mean()), 3, plan=plan)

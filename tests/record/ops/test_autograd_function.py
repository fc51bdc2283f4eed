"""Autograd functions that are applied between modules."""

from __future__ import annotations

from typing import Any

import torch
from tests.support.plainly import assert_same_as_plainly, train
from torch import Tensor, nn


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), x.t() @ gradients[0]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(_Product.apply(x, self.weight)))


def test_a_function_of_a_parameter_and_a_batch_is_recorded_with_its_backward() -> None:
    """No argument is a recorded tensor: its forward was recorded by itself, and the weight had no gradient."""
    assert_same_as_plainly(_Net, train, 2)

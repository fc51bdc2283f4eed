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


class Halves(nn.Module):
    """A slice of channels crosses the border, of an image that is stored channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x.contiguous(memory_format=torch.channels_last)).split(8, 1)
        together = torch.cat([left, self.middle(right)], 1)
        assert together.is_contiguous(memory_format=torch.channels_last)
        return self.last(together)


def test_a_slice_keeps_the_order_of_its_dimensions_over_a_border() -> None:
    x = torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    plan = {"first": "rank:0", "middle": "rank:1", "last": "rank:0"}
    assert_same_as_plainly(Halves, lambda model: train(model, x, lambda out: out.square().mean()), 2, plan=plan)


class Heads(nn.Module):
    """Their results are put side by side: the gradient of each is a slice of a larger one, and `exp` takes eight
    numbers at once only where they lie side by side.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 7), nn.ELU()) for _ in range(3))
        self.last = nn.Linear(21, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([head(x) for head in self.heads], -1))


def test_a_slice_of_a_gradient_keeps_its_strides_over_a_border() -> None:
    plan = {"heads.0": "rank:0", "heads.1": "rank:1", "heads.2": "rank:2", "last": "rank:1"}
    assert_same_as_plainly(Heads, lambda model: train(model, X, lambda out: out.square().mean()), 3, plan=plan)


class Parts(nn.Module):
    """A slice of a result crosses the border, and so does one element that stands for many."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 30), nn.Sequential(nn.ELU(), nn.Linear(7, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h[..., 3:10]) + self.last(h[..., :1].expand(*h.shape[:-1], 7)) + self.last(h.diagonal()[:7])


def test_a_slice_of_a_result_keeps_its_strides_over_a_border() -> None:
    plan = {"first": "rank:0", "last": "rank:1"}
    assert_same_as_plainly(Parts, lambda model: train(model, X[0], lambda out: out.square().mean()), 2, plan=plan)

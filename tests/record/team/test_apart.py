"""Operations are done part by part only where results and gradients are those of the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.call.infer.entry import meta_of
from farspan.call.pytree.template import flatten_arguments
from farspan.record.team.parts.apart import Operand, Trial, tried
from farspan.record.team.parts.shares import share_of
from farspan.record.team.parts.sizes import TAKES_SIZES, sizes_of_part

X = torch.randn(2, 4, 6, 8)
"""Of batch, heads, positions, width."""


class WrongBehind(torch.autograd.Function):
    """Right in the forward of a part; its gradient depends on how many heads there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * gradients[0].shape[1]


def found(function: Any, *args: Any, dims: tuple[int | None, ...], written: tuple[int, ...] = ()) -> Trial | None:
    """How two members do an operation on tensors that are split along `dims`."""
    template, tensors = flatten_arguments(args, {})
    first = next(number for number, dim in enumerate(dims) if dim is not None)
    sizes: Any = args[1:]
    if function in TAKES_SIZES:
        sizes = sizes_of_part(function, args, {}, tensors[first].shape, dims[first] or 0, 2)
        if sizes is None:
            return None
    operands = [
        Operand(
            whole=dataclasses.replace(meta_of(item), requires_grad=item.is_floating_point()),
            dim=dim,
            parts=tuple([meta_of(item if dim is None else part_of(item, dim, member)) for member in range(2)]),
        )
        for item, dim in zip(tensors, dims, strict=True)
    ]
    part_template, _ = flatten_arguments((args[0], *sizes), {})
    return tried(function, template, [part_template] * 2, operands, dims, written, 2)


def part_of(item: Tensor, dim: int, member: int) -> Tensor:
    return share_of(item, dim, 1, member, 2).contiguous()


@pytest.mark.parametrize(
    ("function", "args", "dims", "result"),
    [
        (torch.softmax, (X, -1), (1,), 1),
        (torch.Tensor.transpose, (X, 1, 2), (1,), 2),
        (torch.Tensor.reshape, (X.transpose(1, 2), 2, 6, -1), (2,), 2),
        (torch.Tensor.view, (torch.randn(2, 6, 32), 2, 6, 4, 8), (2,), 2),
        (torch.Tensor.expand, (X[:, :, :1], 2, 4, 5, 8), (1,), 1),
        (torch.matmul, (X, X.transpose(2, 3)), (1, 1), 1),
        (torch.add, (X, torch.randn(6, 8)), (1, None), 1),
        (torch.mul, (X, torch.randn(4, 1, 1)), (1, 0), 1),
        (F.scaled_dot_product_attention, (X, X + 1, X - 1), (1, 1, 1), 1),
        (F.layer_norm, (X, (8,), torch.randn(8), torch.randn(8)), (1, None, None), 1),
        (torch.Tensor.mean, (X, -1), (1,), 1),
        (torch.Tensor.mul_, (X, 2.0), (1,), 1),
        (torch.tanh, (torch.randn(3, 7),), (1,), 1),
    ],
)
def test_part_by_part(function: Any, args: tuple[Any, ...], dims: tuple[int | None, ...], result: int) -> None:
    trial = found(function, *args, dims=dims, written=(0,) if function is torch.Tensor.mul_ else ())
    assert trial is not None
    assert set(trial.results) == {(result, 1)}


def test_batch_and_heads_in_one_dimension_are_a_section_for_each_row() -> None:
    """The heads of one row lie between those of others."""
    trial = found(torch.Tensor.reshape, X, 8, 6, 8, dims=(1,))
    assert trial is not None
    assert trial.results == ((0, 2),)


def test_parts_of_different_lengths() -> None:
    operand = Operand(
        whole=dataclasses.replace(meta_of(torch.randn(3, 7)), requires_grad=True),
        dim=1,
        parts=(meta_of(torch.randn(3, 4)), meta_of(torch.randn(3, 3))),
    )
    template, _ = flatten_arguments((torch.randn(3, 7),), {})
    trial = tried(torch.tanh, template, [template] * 2, [operand], (1,), (), 2)
    assert trial is not None
    assert trial.results == ((1, 1),)


@pytest.mark.parametrize(
    ("function", "args", "dims"),
    [
        (torch.softmax, (X, 1), (1,)),
        (torch.Tensor.sum, (X, 1), (1,)),
        (torch.Tensor.view, (torch.randn(2, 6, 30), 2, 6, 3, 10), (2,)),  # three heads
        (torch.matmul, (X, torch.randn(8, 4)), (3, 0)),  # partial sums
        (torch.cumsum, (X, 1), (1,)),
        (torch.Tensor.flip, (X, (1,)), (1,)),
        (torch.add, (X, torch.randn(4, 1, 1)), (1, None)),
        (WrongBehind.apply, (X,), (1,)),
    ],
)
def test_on_the_whole(function: Any, args: tuple[Any, ...], dims: tuple[int | None, ...]) -> None:
    assert found(function, *args, dims=dims) is None


@pytest.mark.parametrize("reduce", [torch.any, torch.max, lambda x: torch.isinf(x).any()])
def test_what_depends_on_numbers_that_were_not_tried(reduce: Callable[[Tensor], Tensor]) -> None:
    """No part is infinite in a trial, and none may be taken for the whole all the same."""
    assert found(reduce, X, dims=(1,)) is None

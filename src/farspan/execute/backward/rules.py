"""Rules for weight gradients that can be computed later, by the node of autograd.

    node                    forward                         weight work
    AddmmBackward0          beta * b + alpha * x @ w        db = beta * g summed, dw = alpha * x^T @ g
    MmBackward0             x @ w                           dw = x^T @ g
    BmmBackward0            x @ w, batched                  dw = x^T @ g, batched
    ConvolutionBackward0    all convolutions                dw, db by torch's own backward, the input's masked out

A rule calls the same kernels as autograd's own node, in the same layout, so its result has the same bits. They are
written after torch's tools/autograd/derivatives.yaml and FunctionsManual.cpp (`mm_mat1_grad`, `mm_mat2_grad`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farspan.call.remat.unit import unpacks_again
from farspan.torch_private import hooks_on_saved

__all__ = ["RULES", "Rule", "WeightWork", "can_wait"]

WeightWork = Callable[[Sequence[int]], list[torch.Tensor]]
"""Computes the gradients of the requested inputs of a node."""


def _saved(node: Any, name: str) -> Any:
    """Returns what a node keeps, without the graph that it comes from: that would stay until the weight work is
    done."""
    tensor = getattr(node, f"_saved_{name}")
    return None if tensor is None else tensor.detach()


def _addmm(node: Any, gradient: torch.Tensor) -> WeightWork:
    mat1, mat2, alpha, beta = _saved(node, "mat1"), _saved(node, "mat2"), node._saved_alpha, node._saved_beta
    sizes1, strides1 = node._saved_mat1_sym_sizes, node._saved_mat1_sym_strides
    sizes2, strides2 = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides

    def work(requested: Sequence[int]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for number in requested:
            if number == 0:
                found.append(_scaled(gradient, beta))
            elif number == 1:
                found.append(_scaled(_left_gradient(gradient, mat2, sizes1, strides1), alpha))
            else:
                found.append(_scaled(_right_gradient(gradient, mat1, sizes2, strides2), alpha))
        return found

    return work


def _mm(node: Any, gradient: torch.Tensor) -> WeightWork:
    left, right = _saved(node, "self"), _saved(node, "mat2")
    left_layout = (node._saved_self_sym_sizes, node._saved_self_sym_strides)
    right_layout = (node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides)

    def work(requested: Sequence[int]) -> list[torch.Tensor]:
        return [
            _right_gradient(gradient, left, *right_layout) if number else _left_gradient(gradient, right, *left_layout)
            for number in requested
        ]

    return work


def _bmm(node: Any, gradient: torch.Tensor) -> WeightWork:
    left, right = _saved(node, "self"), _saved(node, "mat2")

    def work(requested: Sequence[int]) -> list[torch.Tensor]:
        return [
            left.transpose(1, 2).conj().bmm(gradient) if number else gradient.bmm(right.transpose(1, 2).conj())
            for number in requested
        ]

    return work


def _convolution(node: Any, gradient: torch.Tensor) -> WeightWork:
    x, weight = _saved(node, "input"), _saved(node, "weight")
    how = (
        node._saved_bias_sym_sizes_opt,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
    )

    def work(requested: Sequence[int]) -> list[torch.Tensor]:
        mask = [False, 1 in requested, 2 in requested]
        gradients = torch.ops.aten.convolution_backward(gradient, x, weight, *how, mask)
        return [gradients[number] for number in requested]

    return work


def _left_gradient(gradient: torch.Tensor, right: Any, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Returns the gradient of x in x @ right, in the layout of x."""
    if _is_column_major(sizes, strides):
        return right.conj().mm(gradient.t()).t()
    return gradient.mm(right.t().conj())


def _right_gradient(gradient: torch.Tensor, left: Any, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Returns the gradient of w in left @ w, in the layout of w."""
    if _is_column_major(sizes, strides):
        return gradient.t().mm(left.conj()).t()
    return left.t().conj().mm(gradient)


def _is_column_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    return strides[0] == 1 and strides[1] == sizes[0]


def _scaled(tensor: torch.Tensor, factor: Any) -> torch.Tensor:
    if factor == 1:
        return tensor
    return tensor * (factor.conjugate() if isinstance(factor, complex) else factor)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for splitting a kind of node."""

    weights: tuple[int, ...]
    """The inputs whose gradients can wait."""
    saved: tuple[str, ...]
    """Returns what the node keeps from its forward."""
    take: Callable[[Any, torch.Tensor], WeightWork]
    """Takes from the node, and from its incoming gradient, what the work needs."""


RULES = {
    "AddmmBackward0": Rule((0, 1, 2), ("mat1", "mat2"), _addmm),
    "MmBackward0": Rule((0, 1), ("self", "mat2"), _mm),
    "BmmBackward0": Rule((0, 1), ("self", "mat2"), _bmm),
    "ConvolutionBackward0": Rule((1, 2), ("input", "weight"), _convolution),
}
"""The rules by the node's name."""


def can_wait(node: Any, number: int) -> bool:
    """Returns whether the gradient of `node`'s input `number` can be computed after the node has run.

    Not where what it has saved goes through hooks: a checkpoint gives each saved tensor back once. Remat's own give it
    as often as they are asked.
    """
    rule = RULES.get(node.name())
    if rule is None or number not in rule.weights:
        return False
    hooks = hooks_on_saved(node, rule.saved)
    return hooks is not None and all(map(unpacks_again, hooks))

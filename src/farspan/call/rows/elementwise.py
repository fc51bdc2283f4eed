"""Operations on each element, or that keep what they are given."""

from __future__ import annotations

from typing import Any

import torch

from farspan.call.rows.layout import Layout, Mixed, Op, Partial, Replicate, Shard, joined

__all__ = [
    "ELEMENTWISE",
    "FACTORIES",
    "LOSSES",
    "SAME",
    "elementwise",
    "factory",
    "loss",
    "same",
    "written",
]

ELEMENTWISE = frozenset(
    [
        "leaky_relu_backward",
        "elu_backward",
        "hardtanh_backward",
        "log_sigmoid_forward",
        "log_sigmoid_backward",
        "softplus_backward",
        "_prelu_kernel",
        "_prelu_kernel_backward",
        "prelu",
        "hardswish_backward",
        "hardsigmoid_backward",
        "mish_backward",
        "softshrink_backward",
        "hardshrink_backward",
        "polar",
        "complex",
        "real",
        "imag",
        "native_dropout",
        "rrelu_with_noise",
        "_fused_dropout",
        "rsub",
        "fake_quantize_per_tensor_affine_cachemask",
        "fake_quantize_per_tensor_affine_cachemask_backward",
        "masked_fill",
        "masked_fill_",
        "bernoulli",
        "rand_like",
        "randn_like",
        "randint_like",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "native_dropout_backward",
        "to_dense",
        "nan_to_num_backward",
        "view_as_real_copy",
    ]
)
"""Elementwise operations beside those that torch itself marks as pointwise."""
SAME = frozenset(
    [
        "clone",
        "detach",
        "alias",
        "_to_copy",
        "lift",
        "lift_fresh",
        "lift_fresh_copy",
        "contiguous",
        "_conj",
        "_neg_view",
        "conj_physical",
    ]
)
"""Operations that give what they are given, with the same sizes."""
FACTORIES = frozenset(
    [
        "zeros",
        "ones",
        "full",
        "empty",
        "rand",
        "randn",
        "randint",
        "empty_strided",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new_empty_strided",
        "scalar_tensor",
        "arange",
        "linspace",
        "logspace",
        "eye",
        "tril_indices",
        "triu_indices",
        "hann_window",
        "hamming_window",
        "normal",
        "uniform",
    ]
)
_ZEROS = frozenset(["zeros", "new_zeros", "zeros_like", "zero"])
_LINEAR = frozenset(["add", "sub", "neg", "mul", "div", "clone", "detach", "alias", "_to_copy", "lift_fresh"])
LOSSES = frozenset(
    [
        "mse_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "soft_margin_loss",
        "mse_loss_backward",
        "smooth_l1_loss_backward",
        "huber_loss_backward",
        "binary_cross_entropy_with_logits",
        "binary_cross_entropy_backward",
        "soft_margin_loss_backward",
    ]
)
_PLAIN_ARANGE = (("start", 0), ("step", 1))
_NONE, _MEAN, _SUM = 0, 1, 2


def elementwise(op: Op) -> Layout:
    """Lays out a result each of whose elements is made of the elements at its place."""
    if any(isinstance(op.of(item), Partial) for item in op.tensors):
        return _linear(op)
    layout = joined(op, op.tensors, op.results[0].dim() if op.results else 0)
    if isinstance(layout, Replicate) and (op.name in _ZEROS):
        return Replicate(is_zero=True)
    return layout


def _linear(op: Op) -> Layout:
    """Lays out the result for partial sums: the sum of the results is the result for the sum."""
    tensors = op.tensors
    layouts = [op.of(item) for item in tensors]
    partial = next(item for item in layouts if isinstance(item, Partial))
    if op.name in ("zeros_like", "empty_like"):
        return Replicate(is_zero=op.name == "zeros_like")
    if op.name == "ones_like":  # the gradient that a loss begins with, which is not that of a mean if this is its sum
        return op.mixed() if partial.is_mean else Replicate()
    if op.name not in _LINEAR or not all(item.is_floating_point() for item in op.results):
        return op.mixed()
    if op.name in ("add", "sub"):
        is_scalar = len(tensors) == 1
        fine = all(item == partial or item == Replicate(is_zero=True) for item in layouts)
        return partial if fine and not is_scalar else op.mixed()
    if op.name in ("mul", "div"):
        others = [item for item in layouts if not isinstance(item, Partial)]
        is_first = layouts[0] == partial and op.given.get("rounding_mode") is None
        fine = all(isinstance(item, Replicate) for item in others) and len(layouts) - len(others) == 1
        return partial if fine and (is_first or op.name == "mul") else op.mixed()
    return partial


def same(op: Op) -> Layout:
    """Lays out the same elements, in another tensor."""
    layout = op.of(op["self"])
    result = op.results[0]
    if isinstance(layout, Partial) and not result.is_floating_point():
        return op.mixed()
    if isinstance(layout, Shard) and layout.is_index and result.dtype not in (torch.int64, torch.int32):
        return op.mixed()
    return layout


def written(op: Op) -> Layout:
    """`x.copy_(y)`, `x.fill_(1)`, `x.zero_()`, `x.normal_()`: what was in `x` is gone."""
    into, source = op["self"], op.given.get("src", op.given.get("value"))
    if isinstance(op.given.get("p"), torch.Tensor):
        return op.mixed()
    layout = joined(op, [source], into.dim()) if isinstance(source, torch.Tensor) else Replicate(op.name == "zero")
    own = op.of(into)
    if isinstance(source, torch.Tensor) and isinstance(op.of(source), Partial) and source.dim() == into.dim():
        return op.of(source) if into.is_floating_point() == source.is_floating_point() else op.mixed()
    if isinstance(own, Shard) and isinstance(layout, Replicate):
        dim = own.dim - into.dim() + (source.dim() if isinstance(source, torch.Tensor) else 0)
        fits = dim < 0 or not isinstance(source, torch.Tensor) or source.shape[dim] == 1
        return Shard(own.dim, own.outer) if fits else op.mixed()
    return layout


def factory(op: Op) -> Layout:
    """Lays out a tensor that is made of nothing but sizes."""
    result = op.results[0]
    if op.name in ("arange", "linspace", "logspace"):
        if not op.follows_rows([*op.given.values()]):
            return Replicate()
        is_rows = op.name == "arange" and result.dtype in (torch.int64, torch.int32) and op.units(op["end"]) == 1
        is_rows = is_rows and all(_is_number(op.given.get(name, number), number) for name, number in _PLAIN_ARANGE)
        return Shard(0, is_index=True) if is_rows else op.mixed()
    dim = op.sharded_dim(result)
    if dim == -2:
        return op.mixed()
    return Replicate(op.name in _ZEROS) if dim < 0 else Shard(dim)


def _is_number(item: Any, number: int) -> bool:
    return isinstance(item, int) and item == number


def loss(op: Op) -> Layout:
    """Losses of elements, and their gradients."""
    reduction: Any = op["reduction"]
    if reduction == _MEAN:
        layout = joined(op, op.tensors, max(item.dim() for item in op.tensors))
        return layout if isinstance(layout, Replicate) else Mixed(f"{op.name} (a mean)")
    if op.name.endswith("_backward"):
        return joined(op, op.tensors, op.results[0].dim())
    layout = joined(op, op.tensors, max(item.dim() for item in op.tensors))
    return Partial() if isinstance(layout, Shard) and reduction == _SUM else layout

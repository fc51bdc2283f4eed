"""Lists torch's own functions whose results follow from the metadata of their arguments by torch's formulas alone.

torch keeps these formulas as the kernels of its meta device. A run there costs a tenth of one on fake tensors, which
go the way of the real device through Python. What must hold for a function to be listed: it draws no random numbers,
what it gives has the same metadata on every device, and it writes into nothing but its first argument.
`tests/call/test_formulas.py` compares each of them with fakes, over shapes, strides and dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from farspan.call.modes import Modes
from farspan.graph import Meta

if TYPE_CHECKING:
    from farspan.call.leaf import Target

__all__ = ["FORMULAS", "PRODUCTS", "device_of_formula"]

_ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "addcdiv", "addcmul", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "clamp",
    "clamp_max", "clamp_min", "cos", "cosh", "div", "eq", "erf", "erfc", "exp", "expm1", "floor", "floor_divide",
    "fmod", "ge", "gt", "hypot", "isfinite", "isinf", "isnan", "le", "lerp", "log", "log10", "log1p", "log2",
    "logical_and", "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum", "mul", "ne", "neg", "pow",
    "reciprocal", "relu", "remainder", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "square", "sub",
    "tan", "tanh", "tril", "triu", "true_divide", "trunc", "where", "xlogy",
)  # fmt: skip
_IN_PLACE = (
    "abs_", "add_", "addcdiv_", "addcmul_", "clamp_", "clamp_max_", "clamp_min_", "copy_", "div_", "exp_", "fill_",
    "floor_", "lerp_", "log_", "masked_fill_", "mul_", "neg_", "pow_", "reciprocal_", "relu_", "round_", "sigmoid_",
    "sign_", "sqrt_", "sub_", "tanh_", "zero_",
)  # fmt: skip
_REDUCTIONS = (
    "all", "amax", "amin", "any", "argmax", "argmin", "cumsum", "log_softmax", "logsumexp", "max", "mean", "min",
    "norm", "prod", "softmax", "std", "sum", "var",
)  # fmt: skip
_VIEWS = (
    "chunk", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten", "movedim", "narrow", "permute",
    "reshape", "select", "split", "squeeze", "swapaxes", "t", "transpose", "unbind", "unsqueeze", "view",
    "view_as",
)  # fmt: skip
_JOINS = ("cat", "clone", "flip", "gather", "index_select", "repeat", "roll", "stack")
_LIKE = ("empty_like", "full_like", "ones_like", "zeros_like")
_CASTS = ("bfloat16", "bool", "double", "float", "half", "int", "long")
_OPERATORS = (
    "__add__", "__and__", "__iadd__", "__imul__", "__isub__", "__itruediv__", "__mul__", "__neg__", "__or__", "__pow__",
    "__radd__", "__rdiv__", "__rmul__", "__rpow__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__",
)  # fmt: skip
_FUNCTIONAL = (
    "binary_cross_entropy_with_logits", "cross_entropy", "elu", "embedding", "gelu", "glu", "group_norm", "hardtanh",
    "huber_loss", "kl_div", "l1_loss", "layer_norm", "leaky_relu", "log_softmax", "mish", "mse_loss", "nll_loss",
    "normalize", "one_hot", "pad", "relu", "relu6", "selu", "silu", "smooth_l1_loss", "softmax", "softplus", "tanh",
)  # fmt: skip
_PRODUCTS = ("addmm", "bmm", "matmul", "mm", "mv", "__matmul__")


def _functions(room: Any, *names: str) -> set[Any]:
    return {getattr(room, name) for name in names if hasattr(room, name)}


PRODUCTS: frozenset[Any] = frozenset(
    _functions(torch, *_PRODUCTS) | _functions(torch.Tensor, *_PRODUCTS) | _functions(F, "linear")
)
"""Those of which operations are counted."""
_OF_BOTH = (*_ELEMENTWISE, *_REDUCTIONS, *_VIEWS, *_JOINS)
FORMULAS: frozenset[Any] = PRODUCTS | frozenset(
    _functions(torch, *_OF_BOTH, *_LIKE, "layer_norm")
    | _functions(torch.Tensor, *_OF_BOTH, *_IN_PLACE, *_CASTS, *_OPERATORS, "__getitem__")
    | _functions(F, *_FUNCTIONAL)
)
"""All of them, products too."""


def device_of_formula(target: Target, template: Any, metas: Sequence[Meta], modes: Modes) -> torch.device | None:
    """Returns the device of the results, if a formula says what `target` gives; else None.

    Args:
        target: What is called, with tensors of these `metas`, under these `modes`.
        template: Of all its arguments.
    """
    if target not in FORMULAS or not metas:
        return None
    _, _, autocast, settings = modes
    device = metas[0].device
    if autocast or settings.device is not None or torch.are_deterministic_algorithms_enabled():
        return None
    if any(meta.device != device or len(meta.stride) != len(meta.shape) for meta in metas):
        return None
    if target is torch.Tensor.__getitem__ and len(metas) > 1:
        return None  # how many elements a mask selects depends on its data
    named = template[1][1][3]
    return None if any(name in _UNCERTAIN for name, _ in named) else device


_UNCERTAIN = frozenset(["device", "out", "pin_memory"])

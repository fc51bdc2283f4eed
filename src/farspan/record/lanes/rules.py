"""Rules for the torch functions that can be recorded lane by lane, and with which arguments in each.

A rule says for certain what a function does with each row; where it cannot, the lanes are joined.

    elementwise           relu(x), x + y, x * mask        plain tensors are cut where broadcasting lines them up
    by dim                softmax(x, -1), x.argmax(1)     any dim but the batch's
    views                 x.view(-1, V), x[:, :-1], x.permute(..)
    reductions            mean, sum, cross_entropy, ...   sums over the lanes, divided by what the whole batch counts
"""

from __future__ import annotations

import functools
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from farspan.record.lanes.lane_tensor import LaneTensor, lane_tensors
from farspan.record.lanes.losses import LOSSES, loss_of_lanes
from farspan.record.lanes.rows import Found, aligned, calls_of, lane_tensors_of, rows_of
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.record.lanes.batches import Lanes

__all__ = ["RULES"]

Rule = Any

_T: Any = torch.Tensor


def _named(*names: str) -> list[Any]:
    """Returns the functions of these names of torch, of tensors and of torch.nn.functional, as far as this release has
    them."""
    found = [getattr(owner, name, None) for owner in (torch, _T, F) for name in names]
    return [function for function in found if function is not None]


def _elementwise(window: Lanes, function: Any, args: Any, kwargs: Any) -> Found:
    is_sum = _linear_in_sum(window, function, args, kwargs)
    if is_sum is not None:
        return is_sum
    found = lane_tensors_of(window, [args, kwargs])
    if found is None or any(isinstance(item, torch.Tensor) for item in kwargs.values()):
        return None
    first = max(found, key=lambda item: item.dim())
    rows = rows_of(first)
    columns = [aligned(item, first, rows) for item in args]
    known = [column for column in columns if column is not None]
    if len(known) < len(columns):
        return None
    return calls_of(function, known, [kwargs] * len(rows)), False


_LINEAR = frozenset(
    _named(
        *["mul", "multiply", "div", "divide", "true_divide", "neg", "__mul__", "__rmul__", "__truediv__", "__neg__"],
        *["detach", "float", "double", "to", "clone"],
    )
)
_ADDS = frozenset(_named("add", "sub", "__add__", "__sub__", "__radd__"))


def _linear_in_sum(window: Lanes, function: Any, args: Any, kwargs: Any) -> Found:
    """Records for each summand what is linear in numbers that are sums over the lanes."""
    found = lane_tensors([args, kwargs])
    if kwargs or any(item._window is not window or item._dim is not None for item in found):
        return None
    num_lanes = len(window.sizes)
    if function in _LINEAR and len(found) == 1:
        is_divisor = len(args) > 1 and args[1] is found[0] and "div" in function.__name__
        others = [item for item in args if item is not found[0]]
        takes_type = function is _T.to and any(isinstance(item, torch.Tensor) for item in others)
        if is_divisor or takes_type or not all(_is_number(item) for item in others):
            return None
    elif not (function in _ADDS and len(found) == 2 == len(args)):
        return None
    if any(isinstance(item, torch.dtype) and not item.is_floating_point for item in args):
        return None  # each summand would be rounded
    columns = [[*item._lanes] if type(item) is LaneTensor else [item] * num_lanes for item in args]
    return calls_of(function, columns, [{}] * num_lanes), True


def _is_number(item: Any) -> bool:
    """Returns whether it is a factor that every lane can have: no tensor of several elements, none that gradient flows
    to."""
    if isinstance(item, LazyTensor):
        return False
    return not isinstance(item, torch.Tensor) or (item.dim() == 0 and not item.requires_grad)


def _by_dim(position: int, *, is_needed: bool = True) -> Rule:
    """Records, lane by lane, a function that treats what lies along one dim, or several: it must not be the batch's."""

    def rule(window: Lanes, function: Any, args: Any, kwargs: Any) -> Found:
        found = lane_tensors_of(window, [args, kwargs])
        if found is None or len(found) != 1 or args[:1] != (found[0],) or _has_tensors([args[1:], kwargs]):
            return None
        dim = args[position] if len(args) > position else kwargs.get("dim")
        dims = [dim] if isinstance(dim, int) and not isinstance(dim, bool) else dim
        if not isinstance(dims, (list, tuple)) or not dims or not all(type(each) is int for each in dims):
            return _reduction(window, function, args, kwargs) if dim is None and not is_needed else None
        item = found[0]
        if any(each % item.dim() == item._dim for each in dims):
            return None
        return calls_of(
            function, [item._lanes, *[[each] * len(item._lanes) for each in args[1:]]], [kwargs] * len(item._lanes)
        ), False

    return rule


def _reduction(window: Lanes, function: Any, args: Any, kwargs: Any) -> Found:
    """`x.mean()`, `x.sum()`: of all elements."""
    if kwargs or len(args) != 1 or type(args[0]) is not LaneTensor or args[0]._dim is None:
        return None
    item = args[0]
    if item.dtype in _NARROW or (function in _MEANS and not item.dtype.is_floating_point):
        return None  # a sum would overflow where the mean does not; torch's own error
    if function in _SUMS:
        return [functools.partial(torch.sum, lane) for lane in item._lanes], True
    if function in _MEANS:
        return [functools.partial(_mean, lane, item.numel()) for lane in item._lanes], True
    return None


_NARROW = (torch.float16, torch.bfloat16)
_SUMS, _MEANS = frozenset(_named("sum")), frozenset(_named("mean"))


def _mean(lane: torch.Tensor, num_elements: int) -> torch.Tensor:
    return torch.sum(lane) / num_elements


def _view(window: Lanes, function: Any, args: Any, kwargs: Any) -> Found:
    """`view`, `reshape`: rows that follow each other in memory go on doing so if the batch is the first dim."""
    found = lane_tensors_of(window, [args, kwargs])
    if found is None or kwargs or len(found) != 1 or args[0] is not found[0] or args[0]._dim != 0:
        return None
    item = args[0]
    sizes = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if not sizes or not all(type(size) is int for size in sizes):
        return None
    rest = prod(sizes[1:])
    if -1 in sizes[1:]:
        known = abs(prod(sizes))
        if not known or item.numel() % known:
            return None
        rest = item.numel() // sizes[0] if sizes[0] > 0 else 0
        sizes = [item.numel() // known if size == -1 else size for size in sizes]
    if rest <= 0 or any(lane.numel() % rest for lane in item._lanes):
        return None
    return [functools.partial(function, lane, (lane.numel() // rest, *sizes[1:])) for lane in item._lanes], False


def _same(window: Lanes, function: Any, args: Any, kwargs: Any) -> Found:
    """Records, lane by lane, a function of one tensor that changes the order of its dims, or how it lies in memory."""
    found = lane_tensors_of(window, [args, kwargs])
    if found is None or len(found) != 1 or not args or args[0] is not found[0] or _has_tensors([args[1:], kwargs]):
        return None
    return [functools.partial(function, lane, *args[1:], **kwargs) for lane in args[0]._lanes], False


def _flattened(window: Lanes, function: Any, args: Any, kwargs: Any) -> Found:
    """`flatten`: as for `_view`, the batch must be the first dim."""
    is_first = bool(args) and type(args[0]) is LaneTensor and args[0]._dim == 0
    return _same(window, function, args, kwargs) if is_first else None


def _item(window: Lanes, function: Any, args: Any, kwargs: Any) -> Found:
    """`x[:, :-1]`, `x[..., 0]`: indices that leave the batch as it is."""
    found = lane_tensors_of(window, [args, kwargs])
    if found is None or len(found) != 1 or not args or args[0] is not found[0] or _has_tensors([args[1:], kwargs]):
        return None
    item, index = args[0], args[1]
    index = index if isinstance(index, tuple) else (index,)
    if not index or not all(each is Ellipsis or type(each) is int or isinstance(each, slice) for each in index):
        return None
    is_whole = index[0] == slice(None) if isinstance(index[0], slice) else index[0] is Ellipsis
    num_taken = sum(each is not Ellipsis for each in index)
    if (
        item._dim != 0
        or not is_whole
        or (index[0] is Ellipsis and num_taken >= item.dim())
        or index.count(Ellipsis) > 1
    ):
        return None
    return [functools.partial(function, lane, args[1]) for lane in item._lanes], False


def _linear(window: Lanes, function: Any, args: Any, kwargs: Any) -> Found:
    """`F.linear(x, weight, bias)`: each row times the same weight."""
    found = lane_tensors_of(window, [args, kwargs])
    if found is None or len(found) != 1 or not args or args[0] is not found[0] or args[0]._dim == args[0].dim() - 1:
        return None
    return [functools.partial(function, lane, *args[1:], **kwargs) for lane in args[0]._lanes], False


def _has_tensors(item: Any) -> bool:
    if isinstance(item, dict):
        item = list(item.values())
    return isinstance(item, torch.Tensor) or (isinstance(item, (list, tuple)) and any(map(_has_tensors, item)))


_ELEMENTWISE = [
    "abs", "neg", "exp", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "square", "sin", "cos", "tanh",
    "sigmoid", "relu", "relu6", "gelu", "silu", "elu", "selu", "softplus", "leaky_relu", "mish", "hardtanh",
    "hardswish", "logsigmoid", "logit", "erf", "reciprocal", "sign", "round", "floor", "ceil", "clamp", "clip",
    "clamp_min", "clamp_max", "add", "sub", "mul", "div", "multiply", "divide", "true_divide", "subtract",
    "pow", "maximum", "minimum", "where", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or",
    "logical_not", "isnan", "isfinite", "float", "double", "half", "bfloat16", "long", "int", "bool", "to",
    "type_as", "clone", "detach", "contiguous", "masked_fill", "lerp", "__add__", "__radd__", "__sub__",
    "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__", "__neg__", "__eq__", "__ne__",
    "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__or__", "__invert__",
]  # fmt: skip
_BY_DIM = ["softmax", "log_softmax", "logsumexp", "argmax", "argmin", "amax", "amin", "cumsum", "unbind"]

RULES: dict[Any, Rule] = {
    **dict.fromkeys(_named(*_ELEMENTWISE), _elementwise),
    **dict.fromkeys(_named(*_BY_DIM), _by_dim(1)),
    **dict.fromkeys(_named("sum", "mean"), _by_dim(1, is_needed=False)),
    **dict.fromkeys(_named("view", "reshape"), _view),
    **dict.fromkeys(_named("permute", "transpose", "movedim", "unsqueeze", "swapaxes", "squeeze"), _same),
    **dict.fromkeys(_named("flatten"), _flattened),
    _T.__getitem__: _item,
    F.linear: _linear,
    **dict.fromkeys(LOSSES, loss_of_lanes),
}

"""Operations that move elements: views, joining, cutting, padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from farspan.call.rows.layout import Layout, Op, Partial, Replicate, Shard, joined, normal, reshaped
from farspan.torch_private import product, quotient

__all__ = ["SHAPES"]


def _reshaped(op: Op) -> Layout:
    if op["self"].dtype != op.results[0].dtype:  # the same memory, read as other numbers
        return op.mixed()
    return reshaped(op, op.of(op["self"]), op["self"].shape, op.results[0])


def _expand(op: Op) -> Layout:
    layout, (result,) = op.of(op["self"]), op.results
    if isinstance(layout, Shard):
        return replace(layout, dim=layout.dim + result.dim() - op["self"].dim())
    dim = op.sharded_dim(result)
    if dim == -1:
        return layout
    return Shard(dim) if isinstance(layout, Replicate) and dim >= 0 else op.mixed()


def _permute(op: Op) -> Layout:
    layout, ndim = op.of(op["self"]), op["self"].dim()
    if not isinstance(layout, Shard):
        return layout
    order = list(range(ndim))
    if op.name == "t":
        order.reverse()
    elif op.name == "permute":
        order = [normal(dim, ndim) for dim in op["dims"]]
    else:
        one, two = normal(op["dim0"], ndim), normal(op["dim1"], ndim)
        order[one], order[two] = order[two], order[one]
    return replace(layout, dim=order.index(layout.dim))


def _select(op: Op) -> Layout:
    """Lays out one element of a dimension; `unbind` gives all of them."""
    layout = op.of(op["self"])
    if not isinstance(layout, Shard):
        return layout
    dim = normal(op["dim"], op["self"].dim())
    if dim == layout.dim:
        return op.mixed()
    return replace(layout, dim=layout.dim - (dim < layout.dim))


def _select_backward(op: Op) -> Layout:
    layout = op.of(op["grad_output"])
    if not isinstance(layout, Shard):
        return layout
    dim = normal(op["dim"], len(op["input_sizes"]))
    return replace(layout, dim=layout.dim + (dim <= layout.dim))


def _is_zero(item: Any) -> bool:
    return item is None or (isinstance(item, int) and item == 0)


def _slice(op: Op) -> Layout:
    layout, tensor = op.of(op["self"]), op["self"]
    if not isinstance(layout, Shard) or normal(op["dim"], tensor.dim()) != layout.dim:
        return op.mixed() if op.follows_rows([op["start"], op["end"]]) else layout
    return _cut_out(op, layout, op.inner(tensor, layout), op.results[0].shape[layout.dim])


def _cut_out(op: Op, layout: Shard, inner: Any, size: Any) -> Layout:
    """Returns the layout along its own dimension, of which whole blocks of rows are left, or are put in front and
    behind."""
    outer = None if inner is None or op["step"] != 1 or op.units(size) in (0, -1) else quotient(op.units(size), inner)
    start = op.units(op["start"])
    starts_plainly = _is_zero(op["start"]) or (start not in (0, -1) and quotient(start, inner) is not None)
    return replace(layout, outer=outer) if outer is not None and starts_plainly else op.mixed()


def _slice_backward(op: Op) -> Layout:
    layout, grad, (result,) = op.of(op["grad_output"]), op["grad_output"], op.results
    if not isinstance(layout, Shard) or normal(op["dim"], grad.dim()) != layout.dim:
        return op.mixed() if op.follows_rows([op["start"], op["end"]]) else layout
    return _cut_out(op, layout, op.inner(grad, layout), result.shape[layout.dim])


def _split(op: Op) -> Layout | list[Layout]:
    layout, tensor = op.of(op["self"]), op["self"]
    if not isinstance(layout, Shard) or normal(op["dim"], tensor.dim()) != layout.dim:
        return op.mixed() if op.follows_rows([op.given.get("split_size"), op.given.get("split_sizes")]) else layout
    inner = op.inner(tensor, layout)
    outers = [quotient(op.units(item.shape[layout.dim]), inner) for item in op.results]
    if any(not outer or op.units(item.shape[layout.dim]) == -1 for outer, item in zip(outers, op.results, strict=True)):
        return op.mixed()
    return [replace(layout, outer=outer) for outer in outers]


def _cat(op: Op) -> Layout:
    tensors = [item for item in op["tensors"] if tuple(item.shape) != (0,)]
    layouts = [op.of(item) for item in tensors]
    if all(isinstance(item, Partial) for item in layouts):
        return layouts[0] if len(set(layouts)) == 1 else op.mixed()
    ndim = op.results[0].dim()
    layout = joined(op, tensors, tensors[0].dim())
    if not isinstance(layout, Shard):
        return layout
    dim = normal(op["dim"], ndim)
    if op.name == "stack":
        return replace(layout, dim=layout.dim + (dim <= layout.dim))
    if dim != layout.dim:
        return layout
    return replace(layout, outer=product([layout.outer, len(tensors)])) if len(set(layouts)) == 1 else op.mixed()


def _repeat(op: Op) -> Layout:
    layout, tensor, (result,) = op.of(op["self"]), op["self"], op.results
    more = result.dim() - tensor.dim()
    if isinstance(layout, Shard):
        repeats = op["repeats"][layout.dim + more]
        dim, outer = layout.dim + more, product([layout.outer, repeats])
        return replace(layout, dim=dim, outer=outer) if op.units(repeats) == 0 else op.mixed()
    dim = op.sharded_dim(result)
    if dim == -1 or not isinstance(layout, Replicate):
        return layout if dim == -1 else op.mixed()
    return Shard(dim) if dim >= 0 and op.units(op["repeats"][dim]) not in (0, -1) else op.mixed()


def _but_dims(*names: str) -> Callable[[Op], Layout]:
    """Lays out the result of what mixes elements along some dimensions only, and keeps all of them."""

    def rule(op: Op) -> Layout:
        tensors = op.tensors
        ndim = max(item.dim() for item in tensors)
        if len(tensors) == 1 and isinstance(op.of(tensors[0]), (Partial, Replicate)):
            return (
                op.of(tensors[0])
                if op.name in ("flip", "roll", "constant_pad_nd")
                else Replicate()
                if isinstance(op.of(tensors[0]), Replicate)
                else op.mixed()
            )
        layout = joined(op, tensors, ndim)
        if not isinstance(layout, Shard):
            return layout
        given = [op.given.get(name) for name in names]
        dims = [dim for item in given for dim in (item if isinstance(item, (list, tuple)) else [item])]
        if not dims or any(dim is None for dim in dims) or layout.dim in {normal(dim, ndim) for dim in dims}:
            return op.mixed()
        return layout

    return rule


def _pad(op: Op) -> Layout:
    layout, tensor = op.of(op["self"]), op["self"]
    if not isinstance(layout, Shard):
        return layout if isinstance(layout, Replicate) else op.mixed()
    back = tensor.dim() - 1 - layout.dim  # pairs, the last dimension's first
    return layout if all(_is_zero(item) for item in op["pad"][2 * back : 2 * back + 2]) else op.mixed()


def _diagonal(op: Op) -> Layout:
    layout, ndim = op.of(op["self"]), op["self"].dim()
    if not isinstance(layout, Shard):
        return layout
    dims = (normal(op["dim1"], ndim), normal(op["dim2"], ndim))
    return op.mixed() if layout.dim in dims else replace(layout, dim=layout.dim - sum(dim < layout.dim for dim in dims))


def _into_zeros(op: Op) -> Layout:
    """Returns the gradient of `diagonal` and `unfold`: zeros, but for elements of the same rows."""
    grad, (result,) = op.of(op["grad_output" if "grad_output" in op.given else "grad_in"]), op.results
    if not isinstance(grad, Shard):
        return grad
    dims = [op.given[name] for name in ("dim", "dim1", "dim2") if name in op.given]
    dim = op.sharded_dim(result)
    return op.mixed() if dim in {normal(each, result.dim()) for each in dims} else replace(grad, dim=dim)


def _unfold(op: Op) -> Layout:
    layout = op.of(op["self"])
    is_along = isinstance(layout, Shard) and normal(op["dimension"], op["self"].dim()) == layout.dim
    return op.mixed() if is_along else layout


def _last_two(op: Op) -> Layout:
    layout = op.of(op["self"])
    return op.mixed() if isinstance(layout, Shard) and layout.dim >= op["self"].dim() - 2 else layout


SHAPES: dict[str, Callable[[Op], Any]] = {
    **dict.fromkeys(
        ["view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy", "view_copy", "squeeze", "unsqueeze",
         "unflatten"],
        _reshaped,
    ),
    **dict.fromkeys(["expand", "expand_copy"], _expand),
    **dict.fromkeys(["permute", "transpose", "t"], _permute),
    **dict.fromkeys(["select", "unbind"], _select),
    "select_backward": _select_backward,
    "slice": _slice,
    "slice_backward": _slice_backward,
    **dict.fromkeys(
        ["split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk"], _split
    ),
    **dict.fromkeys(["cat", "stack"], _cat),
    "repeat": _repeat,
    **dict.fromkeys(
        ["_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "_safe_softmax", "cumsum",
         "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "topk", "glu", "glu_backward"],
        _but_dims("dim"),
    ),
    **dict.fromkeys(["flip", "roll"], _but_dims("dims")),
    "constant_pad_nd": _pad,
    "diagonal": _diagonal,
    **dict.fromkeys(["diagonal_backward", "unfold_backward"], _into_zeros),
    "unfold": _unfold,
    **dict.fromkeys(["tril", "triu"], _last_two),
    **dict.fromkeys(["view_as_real", "view_as_complex"], lambda op: op.of(op["self"])),
}  # fmt: skip

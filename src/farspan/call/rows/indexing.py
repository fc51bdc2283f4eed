"""Operations that look elements up by numbers, or put them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farspan.call.rows.layout import Layout, Mixed, Op, Partial, Replicate, Shard, joined, normal

__all__ = ["INDEXING"]


def _embedding(op: Op) -> Layout:
    if not isinstance(op.of(op["weight"]), Replicate):
        return op.mixed()
    return joined(op, [op["indices"]], op["indices"].dim())


def _embedding_backward(op: Op) -> Layout:
    grad, indices = op.of(op["grad_output"]), op.of(op["indices"])
    if op["scale_grad_by_freq"]:
        return Mixed("frequencies of an embedding's rows")
    if isinstance(grad, Partial):
        return grad if isinstance(indices, Replicate) else op.mixed()
    if isinstance(grad, Replicate) and isinstance(indices, Replicate):
        return Replicate(grad.is_zero)
    return Partial() if isinstance(grad, Shard) and grad == indices and not grad.is_index else op.mixed()


def _placed(op: Op) -> tuple[list[torch.Tensor | None], int, int]:
    """Returns the indices of `x[i, :, j]` for each dimension of x; where theirs stand in the result, and how many they
    are."""
    tensor = op["self"]
    indices = [*op["indices"], *([None] * (tensor.dim() - len(op["indices"])))]
    used = [dim for dim, item in enumerate(indices) if item is not None]
    is_adjacent = used == list(range(used[0], used[-1] + 1))
    number = max(item.dim() for item in indices if item is not None)
    return indices, used[0] if is_adjacent else 0, number


def _index(op: Op) -> Layout:
    if any(item is not None and item.dtype in (torch.bool, torch.uint8) for item in op["indices"]):
        return op.mixed()
    tensor = op["self"]
    layout = op.of(tensor)
    indices, place, number = _placed(op)
    used = [item for item in indices if item is not None]
    kept = [dim for dim, item in enumerate(indices) if item is None]
    if isinstance(layout, Shard) and not layout.is_index:
        if layout.dim not in kept:
            return _own_rows(op, layout, indices, place, number)
        if any(not isinstance(op.of(item), Replicate) for item in used):
            return op.mixed()
        before = sum(dim < layout.dim for dim in kept)
        return Shard(before + (number if before >= place else 0), layout.outer)
    if not isinstance(layout, Replicate):
        return op.mixed()
    found = joined(op, used, number)
    return Shard(place + found.dim, found.outer) if isinstance(found, Shard) else found


def _own_rows(op: Op, layout: Shard, indices: list[Any], place: int, number: int) -> Layout:
    """`x[torch.arange(len(x)), y]`: from each row what is its own."""
    tensor, own = op["self"], indices[layout.dim]
    numbers = op.of(own)
    if not isinstance(numbers, Shard) or not numbers.is_index or numbers.outer != 1 or layout.outer != 1:
        return op.mixed()
    if op.units(tensor.shape[layout.dim]) != 1 or op.units(own.shape[numbers.dim]) != 1:
        return op.mixed()
    at = numbers.dim + number - own.dim()
    for dim, item in enumerate(indices):
        if item is None or dim == layout.dim:
            continue
        found = joined(op, [item], number)
        fits = found == Shard(at) if isinstance(found, Shard) else _is_one(item, at - number + item.dim())
        if isinstance(found, Mixed) or not fits:
            return op.mixed()
    return Shard(place + at)


def _is_one(tensor: torch.Tensor, dim: int) -> bool:
    return dim < 0 or tensor.shape[dim] == 1


def _index_put(op: Op) -> Layout:
    """`x[i] = y`, and the gradient of `x[i]`."""
    if any(item is not None and item.dtype in (torch.bool, torch.uint8) for item in op["indices"]):
        return _masked_put(op)
    into, values = op.of(op["self"]), op["values"]
    indices, place, number = _placed(op)
    used = [item for item in indices if item is not None]
    layouts = [op.of(item) for item in (*used, values)]
    if all(isinstance(item, Replicate) for item in (into, *layouts)):
        return Replicate()
    if isinstance(into, Shard) and not into.is_index:
        kept = [dim for dim, item in enumerate(indices) if item is None]
        rest = len(kept) + number
        if into.dim in kept:
            if any(not isinstance(op.of(item), Replicate) for item in used):
                return op.mixed()
            before = sum(dim < into.dim for dim in kept)
            at = Shard(before + (number if before >= place else 0), into.outer)
        else:
            own = _own_rows(op, into, indices, place, number)
            if not isinstance(own, Shard):
                return own
            at = own
        found = joined(op, [values], rest)
        if isinstance(found, Shard):
            return into if found == at else op.mixed()
        dim = at.dim - rest + values.dim()
        return into if isinstance(found, Replicate) and _is_one(values, dim) else op.mixed()
    if not isinstance(into, Replicate) or not into.is_zero or not op["accumulate"]:
        return op.mixed()
    if all(isinstance(op.of(item), Replicate) for item in used):
        return op.of(values) if isinstance(op.of(values), Partial) else op.mixed()
    found, own = joined(op, used, number), op.of(values)
    kept_number = op["self"].dim() - len(used)
    if not isinstance(found, Shard) or not isinstance(own, Shard) or values.dim() != number + kept_number:
        return op.mixed()
    return Partial() if own == Shard(place + found.dim, found.outer) else op.mixed()


def _masked_put(op: Op) -> Layout:
    """`x[mask] = 0`: a number in some places."""
    into, (mask, *others), values = op.of(op["self"]), op["indices"], op["values"]
    if others or values.dim() or not isinstance(op.of(values), Replicate) or op["accumulate"]:
        return op.mixed()
    layout = joined(op, [mask], mask.dim())
    if isinstance(into, Replicate):
        return Replicate() if isinstance(layout, Replicate) else op.mixed()
    if not isinstance(into, Shard) or into.is_index:
        return op.mixed()
    if isinstance(layout, Shard):
        return into if (layout.dim, layout.outer) == (into.dim, into.outer) else op.mixed()
    return into if into.dim >= mask.dim() else op.mixed()


def _gather(op: Op) -> Layout:
    """`gather`, `scatter` and `scatter_add`: elements of the same row, or any of what is the same for all rows."""
    tensor, index, source = op["self"], op["index"], op.given.get("src")
    dim = normal(op["dim"], tensor.dim())
    into = op.of(tensor)
    layouts = [into, op.of(index), *([op.of(source)] if isinstance(source, torch.Tensor) else [])]
    if all(isinstance(item, Replicate) for item in layouts):
        return Replicate()
    if all(isinstance(item, Shard) for item in layouts):
        layout = joined(op, [item for item in (tensor, index, source) if isinstance(item, torch.Tensor)], tensor.dim())
        return layout if isinstance(layout, Shard) and layout.dim != dim else op.mixed()
    at = op.of(index)
    if not isinstance(into, Replicate) or not isinstance(at, Shard) or at.is_index or at.dim != dim:
        return op.mixed()
    if op.name == "gather":
        return at
    is_like = isinstance(source, torch.Tensor) and op.units(source.shape[dim]) == op.units(op["index"].shape[dim])
    is_sum = op.name == "scatter_add" and into.is_zero and op.of(source) == at and is_like
    return Partial() if is_sum else op.mixed()


def _index_select(op: Op) -> Layout:
    tensor, layout, index = op["self"], op.of(op["self"]), op.of(op["index"])
    dim = normal(op["dim"], tensor.dim())
    if isinstance(layout, Replicate):
        if isinstance(index, Shard) and not index.is_index:
            return Shard(dim, index.outer)
        return Replicate() if isinstance(index, Replicate) else op.mixed()
    fits = isinstance(layout, Shard) and isinstance(index, Replicate) and dim != layout.dim and not layout.is_index
    return layout if fits else op.mixed()


def _index_add(op: Op) -> Layout:
    into, index, source = op.of(op["self"]), op.of(op["index"]), op.of(op["source"])
    dim = normal(op["dim"], op["self"].dim())
    if all(isinstance(item, Replicate) for item in (into, index, source)):
        return Replicate()
    if isinstance(into, Shard) and isinstance(index, Replicate) and source == into and dim != into.dim:
        return into
    is_zero = isinstance(into, Replicate) and into.is_zero
    if is_zero and isinstance(index, Replicate) and isinstance(source, Partial):
        return source
    fits = isinstance(index, Shard) and not index.is_index and source == Shard(dim, index.outer)
    return Partial() if is_zero and fits else op.mixed()


def _by_boundaries(op: Op) -> Layout:
    """`bucketize`, `searchsorted` in one sorted row, `isin`: each element by itself."""
    names = {
        "bucketize": ("self", "boundaries"),
        "searchsorted": ("self", "sorted_sequence"),
        "isin": ("elements", "test_elements"),
    }
    one, two = names[op.name]
    table = op[two]
    if isinstance(table, torch.Tensor) and (table.dim() != 1 or not isinstance(op.of(table), Replicate)):
        return op.mixed()
    return joined(op, [op[one]], op[one].dim()) if isinstance(op[one], torch.Tensor) else op.mixed()


INDEXING: dict[str, Callable[[Op], Any]] = {
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(["index", "_unsafe_index"], _index),
    **dict.fromkeys(["index_put", "_index_put_impl", "_unsafe_index_put"], _index_put),
    **dict.fromkeys(["gather", "scatter", "scatter_add"], _gather),
    "index_select": _index_select,
    "index_add": _index_add,
    **dict.fromkeys(["bucketize", "searchsorted", "isin"], _by_boundaries),
}

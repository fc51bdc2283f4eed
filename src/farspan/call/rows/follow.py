"""Following the rows of a batch through operations on tensors without data."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from farspan.call.infer.watch import is_switched_off, storage_id
from farspan.call.rows.elementwise import (
    ELEMENTWISE,
    FACTORIES,
    LOSSES,
    SAME,
    elementwise,
    factory,
    loss,
    same,
    written,
)
from farspan.call.rows.indexing import INDEXING
from farspan.call.rows.layout import Layout, Mixed, Op, Replicate, Shard
from farspan.call.rows.products import PRODUCTS
from farspan.call.rows.shapes import SHAPES
from farspan.call.rows.work import RowsWork, work_of
from farspan.torch_private import TorchDispatchMode, decomposed, is_fake, tensors_in, without_assumptions

__all__ = ["Follow", "RowsError"]

_RULES: dict[str, Callable[[Op], Any]] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(SAME, same),
    **dict.fromkeys(FACTORIES, factory),
    **dict.fromkeys(LOSSES, loss),
    **SHAPES,
    **PRODUCTS,
    **INDEXING,
}
_WRITES = dict.fromkeys(
    ["copy", "fill", "zero", "normal", "uniform", "bernoulli", "exponential", "random", "trunc_normal"], written
)
_INDEX = ("aten::index.Tensor", "aten::_unsafe_index.Tensor")
_CHOOSES_KERNELS = ("aten::convolution", "aten::convolution_backward")
"""Operations for which torch chooses among kernels by the number of rows."""
_UNKNOWN = Mixed("what nobody has seen being made")
_SIZES = frozenset(
    ["size", "stride", "end", "start", "repeats", "split_size", "split_sizes", "input_sizes", "input_size", "N"]
)
"""Names of arguments that may follow the number of rows, for they say how large a result is: rules read them."""
_OF_ROW_NUMBERS = frozenset(
    [
        *("view", "_unsafe_view", "squeeze", "unsqueeze", "expand", "permute", "transpose", "t", "slice", "repeat"),
        *("detach", "alias", "_to_copy", "index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put"),
    ]
)
"""Operations that know what to do with the numbers of the rows."""
_READS_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class RowsError(Exception):
    """Raised where it is not certain that the rows of a batch stay apart; says why."""


class Follow(TorchDispatchMode):
    """Notes how the rows of a batch lie in each tensor that is made.

    Args:
        rows: The symbol for the number of rows.
        outside: Ids of tensors that are replaced by others without data: they must not be used themselves, for only
            some ranks have their data.
        place: Says where in the model's code an operation is.
    """

    def __init__(self, rows: Any, outside: Collection[int] = (), place: Callable[[], str] = str) -> None:
        super().__init__()
        self._place = place
        self.rows = rows
        self.outside = outside
        self.is_random = False
        self.precision = 0.0
        """Precision of the least precise numbers made so far: the difference of 1 and the next larger one."""
        self.work: list[RowsWork] = []
        """The work of each operation that was followed, on the whole batch."""
        self.error: Exception | None = None
        """The first one that was raised, for whoever has run the operations to raise."""
        self._layouts: dict[int, Layout] = {}
        self._sharing: dict[int, list[torch.Tensor]] = {}
        """The tensors in each memory; they are kept, so that no other one gets the number of one of them."""
        self._outside: set[int] = set()
        """The memory of parameters, buffers and arguments, which must not be written."""

    def begin(self, tensor: torch.Tensor, layout: Layout) -> None:
        """Say how rows lie in a tensor that comes from outside."""
        self.set(tensor, layout)
        self._outside.add(storage_id(tensor))

    def set(self, tensor: torch.Tensor, layout: Layout) -> None:
        """Say how rows lie in a tensor."""
        if id(tensor) not in self._layouts:
            self._sharing.setdefault(storage_id(tensor), []).append(tensor)
        if isinstance(layout, Mixed) and layout.where is None:
            layout = dataclasses.replace(layout, where=self._place())
        self._layouts[id(tensor)] = layout

    def of(self, item: Any) -> Layout:
        """Returns how rows lie in a tensor; anything else, and a tensor with data, is the same for all of them."""
        if not isinstance(item, torch.Tensor) or not is_fake(item):
            return Replicate()
        return self._layouts.get(id(item), _UNKNOWN)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(id(item) in self.outside for item in tensors_in((args, kwargs))):
            self.error = self.error or RowsError(
                f"it uses a parameter that its modules do not hold under a name{self._place()}"
            )
        with self:
            result = decomposed(func, args, kwargs)
        if result is not NotImplemented:
            return result
        if any(tag in func.tags for tag in _READS_DATA) and (func.name() not in _INDEX or _holds_masks(args[1])):
            raise RowsError(f"it reads data while it runs ({func._overloadpacket.__name__})")
        if any(not is_fake(item) or storage_id(item) in self._outside for item in _written(func, args, kwargs)):
            name = func._overloadpacket.__name__.removesuffix("_")
            raise RowsError(f"it writes into its buffers, weights or arguments ({name}; BatchNorm does)")
        with without_assumptions(self.rows) if func.name() in _CHOOSES_KERNELS else contextlib.nullcontext():
            result = func(*args, **kwargs)
        try:
            self._note(func, args, kwargs, result)
        except Exception as error:
            self.error = self.error or error  # raised here, in a `detach` of autograd's own, it would end the process
        return result

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        given, into = _given(func, args, kwargs), _written(func, args, kwargs)
        name, results = func._overloadpacket.__name__, tensors_in(result)
        if name != "lift_fresh" and any(not is_fake(item) for item in tensors_in([args, kwargs])):
            is_view = any(item.alias_info is not None for item in func._schema.returns)
            self._outside.update(map(storage_id, results if is_view else []))  # of an attribute that is no buffer
        if not results and not into:
            return
        work = work_of(func, args, kwargs, result, [*tensors_in([args, kwargs]), *results])
        self.work += [] if work is None else [work]
        is_random = torch.Tag.nondeterministic_seeded in func.tags and not is_switched_off(func, given)
        name = name[:-1] if into and name.endswith("_") and not name.endswith("__") else name
        op = Op(name, given, results, self.of, self.rows, bool(into))
        layouts = self._layouts_of(func, op)
        if is_random and all(isinstance(item, Replicate) for item in layouts):
            layouts = [Mixed(f"{name} (one draw for all rows)")] * len(layouts)
        self.is_random |= is_random
        self.precision = max([self.precision, *(torch.finfo(item.dtype).eps for item in results if _is_real(item))])
        written_ids = set(map(id, into))
        for tensor, layout in zip(results, layouts, strict=True):
            if id(tensor) not in written_ids:
                self.set(tensor, self._checked(op, tensor, layout))
        for number, tensor in enumerate(into):
            self._write(
                op, tensor, self._checked(op, tensor, layouts[min(number, len(layouts) - 1)] if layouts else op.mixed())
            )

    def _layouts_of(self, func: Any, op: Op) -> Sequence[Layout]:
        """Returns the layouts that the operation's rule gives: one for each result, or for what is written."""
        number = max(len(op.results), 1)
        tensors = op.tensors
        mixed = next((layout for item in tensors if isinstance(layout := self.of(item), Mixed)), None)
        if mixed is not None:
            return [mixed] * number
        if any(op.follows_rows(value) for name, value in op.given.items() if name not in _SIZES):
            return [Mixed(f"{op.name} (the number of rows)")] * number
        if op.name not in _OF_ROW_NUMBERS and any(_is_index(self.of(item)) for item in tensors):
            return [Mixed(f"{op.name} (the numbers of the rows)")] * number
        rule = _WRITES.get(op.name) if op.is_in_place else None
        if rule is None:
            rule = (
                elementwise
                if torch.Tag.pointwise in func.tags
                else _RULES.get(op.name)
                if func.namespace == "aten"
                else None
            )
        if rule is None:
            is_plain = all(isinstance(self.of(item), Replicate) for item in tensors)
            fits = is_plain and not any(map(op.follows_rows, op.given.values()))
            return [Replicate() if fits else Mixed(f"{func.namespace}.{op.name}")] * number
        found = rule(op)
        return found if isinstance(found, list) else [found] * number

    def _checked(self, op: Op, tensor: torch.Tensor, layout: Layout) -> Layout:
        """Returns a layout that fits the sizes of a tensor."""
        dim = op.sharded_dim(tensor)
        if isinstance(layout, Shard):
            return layout if dim == layout.dim and op.inner(tensor, layout) is not None else Mixed(op.name)
        if isinstance(layout, Mixed):
            return layout
        return layout if dim == -1 else Mixed(op.name)

    def _write(self, op: Op, tensor: torch.Tensor, layout: Layout) -> None:
        """A tensor has been written into."""
        before = self.of(tensor)
        others = [item for item in self._sharing.get(storage_id(tensor), []) if item is not tensor]
        if isinstance(before, Replicate) and isinstance(layout, Replicate):
            for item in (tensor, *others):
                if isinstance(self.of(item), Replicate):
                    self.set(item, layout if item is tensor and not others else Replicate())
        elif not isinstance(layout, Mixed) and (before == layout or all(_lie_alike(item, tensor) for item in others)):
            for item in (tensor, *(others if before != layout else ())):
                self.set(item, layout)
        else:
            for item in (tensor, *others):
                self.set(item, layout if isinstance(layout, Mixed) else Mixed(f"{op.name} into a view"))


def _given(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an operation by name."""
    schema = func._schema.arguments
    given = {item.name: item.default_value for item in schema if item.has_default_value()}
    return given | {item.name: value for item, value in zip(schema, args, strict=False)} | kwargs


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns what an operation writes into, by its schema."""
    names = [item.name for item in func._schema.arguments if item.alias_info is not None and item.alias_info.is_write]
    given = _given(func, args, kwargs) if names else {}
    return [tensor for name in names for tensor in tensors_in(given.get(name))]


def _is_index(layout: Layout) -> bool:
    return isinstance(layout, Shard) and layout.is_index


def _holds_masks(indices: Sequence[Any]) -> bool:
    return any(item is not None and item.dtype in (torch.bool, torch.uint8) for item in indices)


def _lie_alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Returns whether two tensors of the same memory have the same elements; in doubt not."""
    where = [(*item.shape, *item.stride(), item.storage_offset()) for item in (one, two)]
    are_numbers = all(isinstance(number, int) for each in where for number in each)
    return are_numbers and one.dtype == two.dtype and where[0] == where[1]


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1

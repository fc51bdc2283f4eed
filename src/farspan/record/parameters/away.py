"""A parameter whose data other ranks hold: they come when an operation needs them, and go again.

    module(x)       addmm(b, x, t(w))     t(w) needs no data: it is away too; addmm gets the data of b and w
    autograd        keeps t(w)            which holds nothing
    backward        mm(grad, t(w))        the data come once more

It acts below autograd, so whatever runs the operation need not know: a module, a backward, a checkpoint that computes
again, a function of the user's own, the program itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from farspan.errors import RecordError
from farspan.graph import Meta
from farspan.torch_private import DisableTorchFunction, disabled_torch_function, make_wrapper_subclass

__all__ = ["AwayParameter", "Store", "real_of"]


class Store(Protocol):
    """The protocol of what gets the data of parameters that are away."""

    may_write: bool
    """Whether the data that it gives are the parameters' own until all groups have written into theirs."""

    def fetch(self, names: Sequence[str]) -> dict[str, torch.Tensor]: ...
    def note_gathering(self, duration_ns: int) -> None: ...


class AwayParameter(torch.Tensor):
    """A parameter, or a view of one, whose data are at its home.

    `isinstance(item, torch.nn.Parameter)` holds where it stands for a parameter. Reading it gets the data.
    """

    _is_param = False
    _name: str
    _store: Store
    _layout: tuple[Sequence[int], Sequence[int], int]
    """Size, strides and offset in the parameter's memory."""

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Any:
        """Returns a plain parameter: for `copy.deepcopy`, which makes another one of the same type."""
        return torch.nn.Parameter(data, requires_grad)

    @staticmethod
    def make(name: str, store: Store, meta: Meta, *, offset: int = 0, requires_grad: bool = False) -> AwayParameter:
        away: AwayParameter = make_wrapper_subclass(
            AwayParameter,
            meta.shape,
            strides=meta.stride,
            storage_offset=offset,
            dtype=meta.dtype,
            device=meta.device,
            requires_grad=requires_grad,
        )
        away._name, away._store = name, store
        away._layout = (tuple(meta.shape), tuple(meta.stride), offset)
        return away

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, began_ns = kwargs or {}, time.perf_counter_ns()
        with DisableTorchFunction():
            view = _view_of(func, args, kwargs)
            if view is None:
                return _run(func, args, kwargs, began_ns)
            view._store.note_gathering(time.perf_counter_ns() - began_ns)
            return view

    def item(self) -> Any:
        return real_of(self).item()

    def tolist(self) -> Any:
        return real_of(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return real_of(self).numpy(force=True)

    def __reduce_ex__(self, protocol: Any) -> Any:
        data = real_of(self)
        if self._is_param:
            return torch.nn.Parameter(data.clone(), self.requires_grad).__reduce_ex__(protocol)
        return data.__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        value = real_of(self)
        return repr(torch.nn.Parameter(value, self.requires_grad) if self._is_param else value)

    def __hash__(self) -> int:
        return id(self)


def _run(func: Any, args: Any, kwargs: Any, began_ns: int) -> Any:
    """Runs an operation on the data, which it was called with at `began_ns`: up to there it is no computing."""
    found: dict[int, AwayParameter] = {}
    _mapped((args, kwargs), lambda item: found.setdefault(id(item), item) if type(item) is AwayParameter else item)
    first = next(iter(found.values()))
    store = first._store
    is_written = func._schema.is_mutable and any(type(item) is AwayParameter for item in _written(func, args, kwargs))
    if is_written and not store.may_write:
        raise RecordError(
            f"{func} writes into {first._name}, whose data other ranks hold.",
            why="that was seen too late: other ranks would not see what is written.",
            hint="write to parameters outside of modules, or keep what is written in a buffer",
        )
    data = store.fetch(list(dict.fromkeys(item._name for item in found.values())))
    plain = {key: data[item._name].as_strided(*item._layout) for key, item in found.items()}
    new_args, new_kwargs = _mapped((args, kwargs), lambda item: plain.get(id(item), item))
    store.note_gathering(time.perf_counter_ns() - began_ns)
    result = func(*new_args, **new_kwargs)
    if not is_written:
        return result
    back = {id(item): found[key] for key, item in plain.items()}
    return _mapped(result, lambda item: back.get(id(item), item))


def _mapped(item: Any, function: Any) -> Any:
    """Returns lists, tuples and dictionaries with `function` of each tensor in its place."""
    if isinstance(item, torch.Tensor):
        return function(item)
    if isinstance(item, (list, tuple)):
        return type(item)([_mapped(each, function) for each in item])
    if isinstance(item, dict):
        return {name: _mapped(each, function) for name, each in item.items()}
    return item


def real_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the data of a tensor that may be away, without history; what is not is returned as it is."""
    if type(tensor) is not AwayParameter:
        return tensor
    with torch.no_grad():
        return tensor._store.fetch([tensor._name])[tensor._name].as_strided(*tensor._layout)


def _view_of(func: Any, args: Any, kwargs: Any) -> AwayParameter | None:
    """Returns the view that `func` gives of a parameter that is away, if that is all it does."""
    returns = func._schema.returns
    if len(returns) != 1 or returns[0].alias_info is None or returns[0].alias_info.is_write or not args:
        return None
    away = args[0]
    others = [item for item in (*args[1:], *kwargs.values()) if isinstance(item, torch.Tensor)]
    if type(away) is not AwayParameter or others or str(returns[0].type) != "Tensor":
        return None
    size, stride, offset = away._layout
    length = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else offset
    memory = torch.empty(length, dtype=away.dtype, device="meta")
    like = func(memory.as_strided(size, stride, offset), *args[1:], **kwargs)
    if like.dtype != away.dtype or like.is_conj() or like.is_neg():
        return None
    meta = Meta(tuple(like.shape), like.stride(), away.dtype, away.device, False)
    return AwayParameter.make(away._name, away._store, meta, offset=like.storage_offset())


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns what `func` writes into, of its arguments."""
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            item = args[number] if number < len(args) else kwargs.get(argument.name)
            found += item if isinstance(item, (list, tuple)) else [item]
    return found

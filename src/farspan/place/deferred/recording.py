"""Notes what a constructor does to large tensors instead of doing it; does all else at once.

an operation              and its tensors                 what happens
view, reshape in place    any                             done: no data are needed
in place                  large                           noted; a generator is moved on
any other                 large ones among the arguments  noted; the result is a tensor without data
any                       small ones, a large result      noted, or done and then noted; the result has no data
needs data (item, any)    large                           done, on a copy of just what it reads
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from farspan.place.deferred.construction import CONSTRUCTION
from farspan.place.deferred.memory import View, mapped
from farspan.torch_private import (
    DisableTorchFunction,
    Form,
    PlainMode,
    form_of,
    has_own_dispatch,
    has_storage,
    key_of_storage,
)

__all__ = ["LEAST_BYTES", "Recording"]

LEAST_BYTES = 16 << 10
"""Smaller memory is filled at once: the state of a generator alone takes 5 KiB."""
_QUANTIZED = frozenset([torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4])
_deterministic: Any = torch.utils.deterministic
_EMPTY = frozenset(["empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"])
_OVERWRITING = frozenset(
    [
        "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_",
        "uniform_", "zero_",
    ]
)  # fmt: skip
"""Operations in place that leave nothing of what was there."""


class Recording(PlainMode):
    """Sees what a constructor does, below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors: list[torch.Tensor] = []
        mapped((args, kwargs), lambda item: tensors.append(item) if isinstance(item, torch.Tensor) else None)
        if any(has_own_dispatch(type(item)) for item in tensors):
            return NotImplemented  # it is seen again, as what their class makes of it
        with DisableTorchFunction(), CONSTRUCTION.lock:
            return self._run(func, args, kwargs, tensors)

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
        form = form_of(func)
        views = {id(item): view for item in tensors if (view := CONSTRUCTION.view_of(item)) is not None}
        if not views:
            return self._on_data(func, form, args, kwargs, tensors)
        if form.is_view:
            return func(*args, **kwargs)
        if form.is_metadata:
            if form.name.startswith("resize"):
                self._fill(views)
            return func(*args, **kwargs)
        if form.writes_more:
            self._fill(views)
            return func(*args, **kwargs)
        written = _written(form, args, kwargs)
        if form.written:
            return self._in_place(func, form, args, kwargs, tensors, views, written)
        return self._functional(func, form, args, kwargs, tensors, views)

    def _in_place(
        self,
        func: Any,
        form: Form,
        args: Any,
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        views: dict[int, View],
        written: Sequence[Any],
    ) -> Any:
        targets: list[torch.Tensor] = []
        mapped(written, lambda item: targets.append(item) if isinstance(item, torch.Tensor) else None)
        given = [item for item in tensors if id(item) not in views]
        is_at_once = any(id(item) not in views for item in targets) or any(map(_stays, given))
        if is_at_once or not (form.is_random or _is_possible(func, args, kwargs)):
            for item in targets:
                if id(item) in views:
                    CONSTRUCTION.fill(views[id(item)].memory)
            rest = {key: view for key, view in views.items() if key not in set(map(id, targets))}
            return func(*self._real(args, rest), **self._real(kwargs, rest))
        random = None
        put_args, put_kwargs = self._put(args, views), self._put(kwargs, views)
        if form.is_random:
            random = CONSTRUCTION.draws.before(kwargs)
            if CONSTRUCTION.draws.is_by_shape(form):
                sources = {key: view for key, view in views.items() if key not in set(map(id, targets))}
                drawn_args, drawn_kwargs = self._put(self._real((args, kwargs), sources), views)
                CONSTRUCTION.draws.move(func, drawn_args, drawn_kwargs, random)
            else:
                func(*self._real(args, views, are_written=True), **self._real(kwargs, views, are_written=True))
        target = views[id(targets[0])] if len(targets) == 1 else None
        others = [view.memory for key, view in views.items() if key != id(targets[0])]
        overwrites = None
        if target is not None and form.name in _OVERWRITING and target.is_whole and target.memory not in others:
            overwrites = target.memory
        CONSTRUCTION.note(
            func,
            put_args,
            put_kwargs,
            written=[views[id(item)] for item in targets],
            random=random,
            overwrites=overwrites,
        )
        if form.num_results == 0:
            return None
        return written[0] if form.num_results == 1 else tuple(written)

    def _functional(
        self,
        func: Any,
        form: Form,
        args: Any,
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        views: dict[int, View],
    ) -> Any:
        if any(_stays(item) for item in tensors if id(item) not in views):
            return func(*self._real(args, views), **self._real(kwargs, views))
        is_by_shape = form.name.endswith("_like") or form.name.startswith("new_")
        is_known = form.is_known_by_form or all(item.is_contiguous() for item in tensors)
        if not form.needs_data and is_known and (not form.is_random or is_by_shape):
            metas = self._inferred(func, args, kwargs)
            if metas is not None:
                return self._without_data(func, form, args, kwargs, views, metas)
        random = CONSTRUCTION.draws.before(kwargs) if form.is_random else None
        result = func(*self._real(args, views), **self._real(kwargs, views))
        return self._forgotten(func, args, kwargs, views, result, random)

    def _on_data(
        self, func: Any, form: Form, args: Any, kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> Any:
        """No argument is without data; the result may be large all the same."""
        if form.written or form.is_view:
            return func(*args, **kwargs)
        if form.name in _EMPTY and not _fills_empty():
            result = func(*args, **kwargs)
            return CONSTRUCTION.adopt(result) if _size(result) >= LEAST_BYTES else result
        if not tensors:
            metas = self._inferred(func, args, kwargs) if _may_be_large(args, kwargs) else None
            if metas is not None and all(meta.numel() * meta.element_size() >= LEAST_BYTES for meta in metas):
                return self._without_data(func, form, args, kwargs, {}, metas)
            return func(*args, **kwargs)
        if any(map(_stays, tensors)):
            return func(*args, **kwargs)
        random = CONSTRUCTION.draws.before(kwargs) if form.is_random else None
        return self._forgotten(func, args, kwargs, {}, func(*args, **kwargs), random)

    def _without_data(
        self, func: Any, form: Form, args: Any, kwargs: dict[str, Any], views: dict[int, View], metas: Sequence[Any]
    ) -> Any:
        """Returns a result of which shapes are known."""
        results = [CONSTRUCTION.new(meta.shape, meta.stride(), meta.dtype) for meta in metas]
        if form.name not in _EMPTY or _fills_empty():
            random = None
            if form.is_random:
                random = CONSTRUCTION.draws.before(kwargs)
                func(*self._real(args, views), **self._real(kwargs, views))
            CONSTRUCTION.note(
                func,
                self._put(args, views),
                self._put(kwargs, views),
                results=[CONSTRUCTION.view_of(item) for item in results],
                random=random,
            )
        if form.returns_list:
            return results
        return results[0] if form.num_results == 1 else tuple(results)

    def _forgotten(
        self, func: Any, args: Any, kwargs: dict[str, Any], views: dict[int, View], result: Any, random: Any
    ) -> Any:
        """Returns the result of an operation, large tensors of it without their data."""
        items = list(result) if type(result) in (tuple, list) else [result]
        used = {key_of_storage(item.untyped_storage()) for item in _tensors((args, kwargs))}
        is_new = [_size(item) >= LEAST_BYTES and key_of_storage(item.untyped_storage()) not in used for item in items]
        if not any(is_new):
            return result
        for number, item in enumerate(items):
            if is_new[number]:
                items[number] = CONSTRUCTION.new(item.shape, item.stride(), item.dtype)
        CONSTRUCTION.note(
            func,
            self._put(args, views),
            self._put(kwargs, views),
            results=[CONSTRUCTION.view_of(item) if new else None for item, new in zip(items, is_new, strict=True)],
            random=random,
        )
        return type(result)(items) if type(result) in (tuple, list) else items[0]

    def _inferred(self, func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """Returns the results as tensors without data; None where only a run tells, or they lie elsewhere."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return None
        put = {**kwargs, "device": "meta"} if device is not None or form_of(func).takes_device else kwargs
        try:
            with torch.no_grad():
                result = func(*mapped(args, _meta), **mapped(put, _meta))
        except (NotImplementedError, RuntimeError):  # the run that follows raises it again if the program is wrong
            return None
        items = list(result) if type(result) in (tuple, list) else [result]
        is_known = all(isinstance(item, torch.Tensor) and item.is_meta and _is_dense(item) for item in items)
        return items if is_known else None

    def _put(self, item: Any, views: dict[int, View]) -> Any:
        """Arguments with views for what has no data."""
        return mapped(item, lambda each: views.get(id(each), each))

    def _real(self, item: Any, views: dict[int, View], *, are_written: bool = False) -> Any:
        """Arguments with copies, with data, for what has none."""
        if not views:
            return item
        found = CONSTRUCTION.contents(list(views.values()), are_written=are_written)
        data = dict(zip(views, found, strict=True))
        return mapped(item, lambda each: data.get(id(each), each))

    def _fill(self, views: dict[int, View]) -> None:
        for view in views.values():
            CONSTRUCTION.fill(view.memory)


def _fills_empty() -> bool:
    """Returns whether torch fills memory that has not been written yet, to find who reads it."""
    return torch.are_deterministic_algorithms_enabled() and _deterministic.fill_uninitialized_memory


def _tensors(item: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    mapped(item, lambda each: found.append(each) if isinstance(each, torch.Tensor) else None)
    return found


def _meta(item: Any) -> Any:
    """Returns a tensor of the same form without data."""
    if not isinstance(item, torch.Tensor):
        return None if isinstance(item, torch.Generator) else item
    return torch.empty_strided(tuple(item.shape), item.stride(), dtype=item.dtype, device="meta")


def _is_possible(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Returns False where shapes or dtypes are wrong: the error is raised where the program does it."""
    try:
        func(*mapped(args, _meta), **mapped(kwargs, _meta))
    except NotImplementedError:
        return True
    except (IndexError, RuntimeError, TypeError, ValueError):
        return False
    return True


def _is_dense(item: torch.Tensor) -> bool:
    return item.layout is torch.strided and item.dtype not in _QUANTIZED


def _is_plain(item: Any) -> bool:
    """Returns whether it is a tensor in memory of this process, which could have been without data."""
    return (
        isinstance(item, torch.Tensor)
        and item.device.type == "cpu"
        and _is_dense(item)
        and not has_own_dispatch(type(item))
        and has_storage(item)
        and not (item.is_conj() or item.is_neg())
    )


def _size(item: Any) -> int:
    """Returns the bytes of the memory that a tensor is in, if that could be without data."""
    return item.untyped_storage().nbytes() if _is_plain(item) else 0


def _stays(item: torch.Tensor) -> bool:
    """Returns whether a tensor with data is too large to be copied for later, or cannot be: what is done with it is
    done at once."""
    return not _is_plain(item) or _size(item) >= LEAST_BYTES


def _written(form: Form, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that an operation writes in place, as they were given."""
    found: list[Any] = []
    for key in form.written:
        if isinstance(key, str):
            found += [kwargs[key]] if key in kwargs else []
        elif key < len(args):
            found.append(args[key])
    return found


def _may_be_large(args: Any, kwargs: dict[str, Any]) -> bool:
    """Returns whether the result of an operation on numbers alone may be large."""
    sizes: list[int] = []
    for item in [*args, *kwargs.values()]:
        if type(item) in (list, tuple, torch.Size) and all(type(each) is int for each in item):
            sizes.append(math.prod(item))
        elif type(item) in (int, float):
            sizes.append(math.ceil(abs(item)) + 1 if math.isfinite(item) else 1)
    return 16 * math.prod(max(size, 1) for size in sizes) >= LEAST_BYTES

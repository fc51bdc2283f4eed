"""Inspects tensors below Python, as only torch's own code can."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunction

from farspan.torch_private.mode_stack import no_dispatch

__all__ = [
    "as_activation",
    "copy_all",
    "fill_with_poison",
    "has_compatible_type",
    "has_memory_of_its_own",
    "has_other_users",
    "is_same_generator",
    "is_wrapped",
    "has_weak_references",
    "is_used_below",
    "make_wrapper",
    "make_wrapper_subclass",
    "move_data",
    "num_users_of_storage",
    "poisoned",
    "raw_grad",
    "raw_grad_fn",
    "set_raw_grad",
    "set_version",
    "shares_only_with_its_base",
    "storage_at",
    "swap_referenced",
    "has_gradient_hooks",
    "hooks_on",
    "tensor_of_class",
    "unscale_",
    "update_scale_",
]

_INTEGERS = frozenset(
    [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
)

_raw_grad = torch.Tensor.grad
raw_grad = _raw_grad.__get__  # type: ignore[attr-defined]
set_raw_grad = _raw_grad.__set__  # type: ignore[attr-defined]
raw_grad_fn = torch.Tensor.grad_fn.__get__  # type: ignore[attr-defined]


copy_all: Any = torch._foreach_copy_
"""Copies each of some tensors into the one at its place in another list."""


ADAPTIVE_RESULT: type = torch.nn.modules.adaptive._ASMoutput
"""What `nn.AdaptiveLogSoftmaxWithLoss` returns."""


def is_same_generator(one: torch.Generator, other: torch.Generator) -> bool:
    """Returns whether two Python objects stand for one generator: an operation gets a new object each time."""
    return one._cdata == other._cdata  # type: ignore[attr-defined]


def has_memory_of_its_own(tensor: torch.Tensor) -> bool:
    """Returns whether no other tensor, array or library uses the memory of `tensor`, and no program holds its
    storage."""
    return tensor.untyped_storage().resizable() and not is_memory_of_others(tensor)


def shares_only_with_its_base(tensor: torch.Tensor) -> bool:
    """Returns whether the memory of `tensor` is used besides by the tensor alone of which it is a view, and whether
    nothing but this view keeps that one: `torch.ones(4, 4).view(16)`."""
    num_torch, num_python = _users_of_memory(tensor)
    with DisableTorchFunction():
        return (num_torch - 1, num_python) == _ONE_USER and _users_of_base(tensor) == _ONE_VIEW


def is_memory_of_others(tensor: torch.Tensor, *, num_own: int = 0) -> bool:
    """Returns whether something else uses the memory of `tensor`: another tensor, an array, a program that holds its
    storage. `num_own` references to the object of the memory in Python are farspan's own.
    """
    num_torch, num_python = _users_of_memory(tensor)
    return (num_torch, num_python - num_own) != _ONE_USER


def _users_of_memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns how many references there are to the memory of `tensor`: torch's, and those to its one object in Python.
    Weak ones do not count: a run on fakes leaves some, which go at another time on each rank.
    """
    storage = tensor.untyped_storage()
    num_torch: int = torch._C._storage_Use_Count(storage._cdata)
    return num_torch, sys.getrefcount(storage)


_one = torch.empty(1, device="cpu")
_ONE_USER = _users_of_memory(_one)


def _users_of_base(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns how many references there are to the tensor of which `tensor` is a view: torch's, and Python's."""
    base = tensor._base
    return (0, 0) if base is None else (base._use_count(), sys.getrefcount(base))  # type: ignore[attr-defined]


_ONE_VIEW = _users_of_base(torch.empty(1, device="cpu").view(1))


storage_at: Callable[[int], Any] = torch.UntypedStorage._new_with_weak_ptr
"""The memory at the address that a weak reference to it tells."""


def has_other_users(tensor: torch.Tensor) -> bool:
    """Returns whether something besides Python's own references uses `tensor` itself, such as an autograd graph."""
    return has_weak_references(tensor) or is_used_below(tensor)


def has_weak_references(tensor: torch.Tensor) -> bool:
    """Returns whether something in Python knows `tensor` without keeping it alive."""
    return bool(weakref.getweakrefs(tensor))


def is_used_below(tensor: torch.Tensor) -> bool:
    """Returns whether something below Python uses `tensor` itself, such as an autograd graph."""
    return tensor._use_count() > 1  # type: ignore[attr-defined]


def move_data(tensor: torch.Tensor, device: torch.device) -> None:
    """Let a parameter or buffer have its data on another device; it stays the same object."""
    with DisableTorchFunction():
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Returns whether hooks are called with the gradient that autograd brings to a tensor, or behind it."""
    with DisableTorchFunction():
        return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def hooks_on(tensor: torch.Tensor) -> list[Any]:
    """Returns the hooks on a tensor that autograd calls with its gradient, and that may change it."""
    with DisableTorchFunction():
        return list((tensor._backward_hooks or {}).values())


def as_activation(leaf: torch.Tensor) -> torch.Tensor:
    """Returns a leaf of autograd, in the same memory, that autocast takes for an activation.

    It casts an activation for each use, so that the gradients of the uses add up in the activation's own precision. Of
    a leaf, as parameters are, it keeps one cast, unless that is a view (`cached_cast` in ATen/autocast_mode.cpp).
    """
    with torch.no_grad():
        return torch.ops.aten.alias.default(leaf)


def poisoned(shape: Any, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Returns a tensor that stands for one whose data are released, in the memory of one element: whoever reads it
    gets nan, or the number of an integer type that is farthest from zero, and not what the memory happened to hold.
    """
    return torch.full((), _poison_of(dtype), dtype=dtype, device=device).expand(shape)


def _poison_of(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool or dtype not in _INTEGERS:
        return 1
    info = torch.iinfo(dtype)
    return info.min or info.max


def fill_with_poison(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Let all of a storage read as `poisoned` does; its tensors are of `dtype`."""
    with no_dispatch(), DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        torch.empty(0, dtype=dtype, device=storage.device).set_(storage).fill_(_poison_of(dtype))  # type: ignore[call-overload]


def num_users_of_storage(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Returns how many references there are to a storage: torch's, and those to its one object in Python."""
    num_torch: int = torch._C._storage_Use_Count(storage._cdata)
    return num_torch, sys.getrefcount(storage)


def tensor_of_class(cls: Any, data: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """Returns a tensor of class `cls` with the memory of `data`."""
    return data if cls is torch.Tensor else torch.Tensor._make_subclass(cls, data, requires_grad)


def swap_referenced(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let two tensors swap their content, as `torch.utils.swap_tensors` does, also where there are weak references to
    them: these mean the same objects as before.

    Raises:
        RuntimeError: Something in torch uses one of them, as an autograd graph does.
    """
    if is_used_below(tensor) or is_used_below(other):
        raise RuntimeError("something in torch uses the tensor")
    one: Any = tensor
    two: Any = other
    one.__class__, two.__class__ = two.__class__, one.__class__
    one.__dict__, two.__dict__ = two.__dict__, one.__dict__
    core: Any = torch._C
    core._swap_tensor_impl(one, two)


def make_wrapper(cls: Any, meta: Any) -> torch.Tensor:
    """Returns a tensor of class `cls` with the shape, strides, dtype and device of `meta` and no storage."""
    return make_wrapper_subclass(
        cls, meta.shape, strides=meta.stride, dtype=meta.dtype, device=meta.device, requires_grad=meta.requires_grad
    )


make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]


is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]
"""Whether a transformation of `torch.func` has put a tensor around another one: it has no memory of its own."""


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what lies inside all transformations of `torch.func`: a tensor with memory of its own."""
    core: Any = torch._C
    while core._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = core._functorch.get_unwrapped(tensor)
    return tensor


has_compatible_type: Any = torch._has_compatible_shallow_copy_type
unscale_: Any = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_: Any = torch._amp_update_scale_


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Let a tensor have been written to as often as `version` says: it is again what it was then."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # type: ignore[attr-defined]

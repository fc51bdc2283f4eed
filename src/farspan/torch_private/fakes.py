"""Makes fake tensors, and distinguishes their limits from errors of the program."""

from __future__ import annotations

import copy
import functools
import logging
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from farspan.torch_private.symbols import Symbols

__all__ = [
    "as_it_is",
    "become_parameter",
    "decomposed",
    "fake_mode",
    "fake_tensor",
    "flops_of",
    "is_fake",
    "is_fake_limit",
    "is_not_torchs_device",
    "lacks_data",
    "on_fakes",
    "silent_fakes",
    "tensors_in",
    "watch_fakes",
    "with_sizes_kept",
]


_aten = torch.ops.aten
_COUNTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_fused_attention_overrideable: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_fused_attention_overrideable_backward: _aten._scaled_dot_product_flash_attention_backward,
}
"""Attention on CPUs and on devices that torch does not know, which its table of operations with products leaves out."""


def fake_mode(*, is_symbolic: bool = False, symbols: Symbols | None = None) -> FakeTensorMode:
    """Returns a mode in which tensors have no data; sizes that depend on data raise, or are symbols."""
    if not is_symbolic and symbols is None:
        mode = copy.copy(
            _plain_mode()
        )  # its constructor takes the stack of its caller apart, which takes a millisecond
        TorchDispatchMode.__init__(mode)
        mode.fake_tensor_converter = FakeTensorConverter(copy_data=mode.propagate_real_tensors)
        mode.enter_stack = []
        return mode
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=(symbols or Symbols()).environment)


@functools.cache
def _plain_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def on_fakes(*, is_symbolic: bool = False, symbols: Symbols | None = None) -> Iterator[None]:
    """Run on fake tensors. No weak reference is left to the real ones that the run uses: it would end when garbage
    is collected, at another time on each rank.
    """
    mode = fake_mode(is_symbolic=is_symbolic, symbols=symbols)
    with mode:
        try:
            yield
        finally:
            mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


def fake_tensor(shape: Sequence[Any], stride: Sequence[Any], dtype: Any, device: Any) -> torch.Tensor:
    """Returns a fake tensor where fakes are made, at a fifth of what the operation costs there; else a tensor.

    Raises:
        UnsupportedFakeTensorException: It has no strides: a sparse tensor.
    """
    if len(stride) != len(shape):
        raise UnsupportedFakeTensorException("a tensor without strides")
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None or mode.shape_env is not None:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    with torch._C._DisableTorchDispatch():
        without_data = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, without_data, torch.device(device))


def become_parameter(fake: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """Let a new fake tensor be an `nn.Parameter`, which for tensors of a class of their own is a mark."""
    fake.requires_grad_(requires_grad)
    fake._is_param = True  # type: ignore[attr-defined]
    return fake


@contextmanager
def silent_fakes() -> Iterator[None]:
    """Let fake tensors raise their errors in the body without logging them: there it is tried whether they fail."""
    if not _Silence.filters:
        logging.getLogger("torch._subclasses.fake_tensor").addFilter(_Silence.lets_through)
    _Silence.filters = True
    number = threading.get_ident()
    depth = _Silence.threads.get(number, 0)
    _Silence.threads[number] = depth + 1
    try:
        yield
    finally:
        if depth:
            _Silence.threads[number] = depth
        else:
            del _Silence.threads[number]


class _Silence:
    """The threads in which fake tensors do not log."""

    threads: ClassVar[dict[int, int]] = {}
    filters: ClassVar[bool] = False

    @staticmethod
    def lets_through(record: logging.LogRecord) -> bool:
        return threading.get_ident() not in _Silence.threads


def watch_fakes(before_hook: Callable[[torch.Tensor], None], before_gradient: Callable[[torch.Tensor], None]) -> None:
    """Let fake tensors report what would be autograd's.

    Args:
        before_hook: Called before a hook is registered on one, or it retains its gradient.
        before_gradient: Called before its `.grad` is read, set or deleted.
    """
    register, retain = torch.Tensor.register_hook, torch.Tensor.retain_grad

    def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
        before_hook(tensor)
        return register(tensor, hook)

    def retain_grad(tensor: torch.Tensor) -> None:
        before_hook(tensor)
        retain(tensor)

    FakeTensor.register_hook = register_hook  # type: ignore[method-assign]
    FakeTensor.retain_grad = retain_grad  # type: ignore[method-assign]
    grad: Any = torch.Tensor.grad

    def seen(access: Callable[..., Any]) -> Callable[..., Any]:
        def access_gradient(tensor: torch.Tensor, *value: Any) -> Any:
            before_gradient(tensor)
            return access(tensor, *value)

        return access_gradient

    accesses = seen(grad.__get__), seen(grad.__set__), seen(grad.__delete__)
    FakeTensor.grad = property(*accesses)  # type: ignore[assignment]
    FakeTensor.apply_ = _refuse_apply  # type: ignore[method-assign]


def _refuse_apply(tensor: torch.Tensor, function: Any) -> torch.Tensor:
    """Says what torch says of `map_`: it would look for data where there are none, and end the process."""
    raise RuntimeError(".apply_ is not supported for tensor subclasses.")


def is_fake(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor has no data."""
    return isinstance(tensor, FakeTensor)


_FAKE_LIMITS = (
    DynamicOutputShapeException,
    DataDependentOutputException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_FAKE_WORDS = (
    "not supported for tensor subclasses",
    "data is not allocated yet",
    "FakeTensor",
    "fake tensor",
    "Meta tensor",
    "meta tensor",
    "_apply(): Couldn't swap",  # module.to() of fakes, to which others refer
)
"""torch's words where a function without a rule for fakes asks for the data."""


def is_not_torchs_device(error: BaseException) -> bool:
    """Returns whether torch was given one of our places ("rank:1", "rank:1/cuda:0") as a device."""
    return isinstance(error, RuntimeError) and re.search(r"device string: '?rank", str(error)) is not None


def is_fake_limit(error: BaseException) -> bool:
    """Returns whether a run on fake tensors failed for want of data, or by torch's rules for fakes, which may be
    stricter than the real thing: only a real run shows whether the user's call is wrong.
    """
    return lacks_data(error) or any(
        frame.f_code.co_filename == _FAKE_FILE for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def lacks_data(error: BaseException) -> bool:
    """Returns whether a run on fake tensors failed for want of data, or of a rule for fakes."""
    return isinstance(error, _FAKE_LIMITS) or (
        isinstance(error, _FAKE_ERRORS) and any(words in str(error) for words in _FAKE_WORDS)
    )


_FAKE_ERRORS = (RuntimeError, NotImplementedError, TypeError)
_FAKE_FILE = sys.modules[FakeTensorMode.__module__].__file__


def flops_of(operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Returns the floating-point operations of an aten operation with products in it, in symbols where its sizes are; 0
    for all others.
    """
    packet = operation._overloadpacket
    count = flop_registry.get(_COUNTED_AS.get(packet, packet))
    return 0 if count is None else count(*args, **kwargs, out_val=result)


def tensors_in(item: Any) -> list[torch.Tensor]:
    """Returns the tensors among the arguments or results of an operation: itself, or in lists, tuples, dictionaries."""
    found: list[torch.Tensor] = []
    _collect(item, found)
    return found


def _collect(item: Any, found: list[torch.Tensor]) -> None:
    if isinstance(item, torch.Tensor):
        found.append(item)
    elif isinstance(item, (list, tuple)):
        for part in item:
            _collect(part, found)
    elif isinstance(item, dict):
        for part in item.values():
            _collect(part, found)


def with_sizes_kept() -> AbstractContextManager[None]:
    """Let torch use those of its rules, in the body, in which sizes can be symbols."""
    return enable_python_dispatcher()


def decomposed(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the result of an operation that torch makes of others, if it is one of those; else NotImplemented."""
    is_known = torch._C._dispatch_has_kernel(func.name())
    return func.decompose(*args, **kwargs) if is_known and func._can_decompose() else NotImplemented


def as_it_is(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Returns what an operation really gives where its rule for fakes gives something else."""
    if func is torch.ops.aten._native_multi_head_attention.default:  # weights that nobody needs are not computed
        given = {item.name: value for item, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        if not given.get("need_weights", True):
            return (result[0], None)
    return result

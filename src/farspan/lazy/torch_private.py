"""The only place that uses torch names which are private or may move: a new torch release is one edit here."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._C import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    _is_any_autocast_enabled,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

__all__ = [
    "DynamicOutputShapeException",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "FakeTensorMode",
    "SYMBOLS",
    "Symbols",
    "TorchDispatchMode",
    "autocast_region",
    "call_container",
    "call_without_compiling",
    "compile_what_it_calls",
    "compiling_nothing",
    "disabled_torch_function",
    "fake_mode",
    "flops_of",
    "forget_casts",
    "has_compatible_type",
    "has_memory_of_its_own",
    "has_other_users",
    "hooks_on_saved",
    "in_autocast_region",
    "is_any_autocast_enabled",
    "is_caching_parametrizations",
    "is_compiled",
    "is_compiled_wrapper",
    "is_fake",
    "is_fake_limit",
    "no_dispatch",
    "is_mode_active",
    "is_not_torchs_device",
    "make_wrapper",
    "raw_grad",
    "raw_grad_fn",
    "recompute_through",
    "saved_by",
    "set_raw_grad",
    "set_version",
    "shape_at",
    "storage_at",
    "put_modes",
    "put_module_apply",
    "take_modes_of",
    "tree_leaves",
    "watch_autocast_regions",
    "watch_backward_hooks",
    "without_any_mode",
    "without_modes_of",
    "unscale_",
    "update_scale_",
    "tensor_of_class",
]

_raw_grad = torch.Tensor.grad
raw_grad = _raw_grad.__get__  # type: ignore[attr-defined]
set_raw_grad = _raw_grad.__set__  # type: ignore[attr-defined]
raw_grad_fn = torch.Tensor.grad_fn.__get__  # type: ignore[attr-defined]


def watch_backward_hooks(watched: Callable[[torch.nn.Module, Any], Any]) -> None:
    """Let modules call `watched(module, hook)` for each of their backward hooks, those of all modules included."""
    get_hooks, get_pre_hooks = torch.nn.Module._get_backward_hooks, torch.nn.Module._get_backward_pre_hooks

    def of_module(module: torch.nn.Module) -> Any:
        return tuple([watched(module, hook) for hook in hooks] for hooks in get_hooks(module))

    def before_module(module: torch.nn.Module) -> Any:
        return [watched(module, hook) for hook in get_pre_hooks(module)]

    torch.nn.Module._get_backward_hooks = of_module  # type: ignore[method-assign]
    torch.nn.Module._get_backward_pre_hooks = before_module  # type: ignore[method-assign]


no_dispatch = torch._C._DisableTorchDispatch
"""Operations in its body are seen by no dispatch mode."""
disabled_torch_function = torch._C._disabled_torch_function_impl
"""As a class's __torch_function__: its tensors are seen by function modes only."""


def call_without_compiling(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module, hooks and all, but for what `module.compile()` put in front."""
    return module._call_impl(*args, **kwargs)


def call_container(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module whose code is to be recorded, which torch.compile cannot trace: what it was compiled from runs."""
    if is_compiled_wrapper(module):
        return module._modules["_orig_mod"](*args, **kwargs)  # type: ignore[misc]
    return module._call_impl(*args, **kwargs)


def is_caching_parametrizations() -> bool:
    """Whether the program is in `torch.nn.utils.parametrize.cached()`."""
    return bool(parametrize._cache_enabled)


def is_compiled_wrapper(module: torch.nn.Module) -> bool:
    """Whether `module` is what `torch.compile(module)` has returned."""
    return type(module).__module__.startswith("torch._dynamo")


def compile_what_it_calls(function: Any) -> None:
    """Let Dynamo compile what `function` calls, and never the frame of `function` itself."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


def compiling_nothing() -> contextlib.AbstractContextManager[Any]:
    """Let what is compiled run as it is written in the body, and Dynamo learn nothing from the run."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled; to load it takes seconds
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calling `module` runs what torch.compile has made of it."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def recompute_through(wrapper: Callable[[Any], Any], is_recorded: Callable[[Any], bool]) -> None:
    """From now on a non-reentrant checkpoint recomputes with `wrapper(function)`, made when it runs `function`.

    Args:
        wrapper: Takes what the checkpoint runs.
        is_recorded: Whether what runs on an argument is recorded: it is not computed again, and need not know the
            generators' states.
    """
    import torch.utils.checkpoint as checkpoint

    name = "_checkpoint_without_reentrant_generator_impl"  # since torch 2.14
    if not hasattr(checkpoint, name):
        name = "_checkpoint_without_reentrant_generator"
    original: Any = getattr(checkpoint, name)

    def generator(function: Any, preserve_rng_state: bool = True, *args: Any, **kwargs: Any) -> Any:
        keeps_states = preserve_rng_state and not any(map(is_recorded, args))
        return original(wrapper(function), keeps_states, *args, **kwargs)

    setattr(checkpoint, name, generator)


class _Regions(threading.local):
    ended = 0


_regions = _Regions()
forget_casts: Callable[[], None] = torch.clear_autocast_cache
"""Drop what autocast has cast, which it keeps until the outermost region is left."""


def watch_autocast_regions() -> None:
    """Begin to count the autocast regions that a thread leaves: torch drops its casts then."""

    def clear_autocast_cache() -> None:
        _regions.ended += 1
        forget_casts()

    torch.clear_autocast_cache = clear_autocast_cache


is_any_autocast_enabled: Callable[[], bool] = _is_any_autocast_enabled
"""Whether autocast is on for some kind of device."""


def autocast_region() -> int:
    """Which outermost autocast region this is, a number that only ever grows; 0 outside of all."""
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return 0 if nesting == 1 else 1 + _regions.ended


@contextlib.contextmanager
def in_autocast_region() -> Iterator[None]:
    """Let the body be one region: autocast contexts that it leaves do not drop the casts."""
    forget_casts()
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        forget_casts()


def has_memory_of_its_own(tensor: torch.Tensor) -> bool:
    """Whether no other tensor, array or library uses the memory of `tensor`."""
    storage = tensor.untyped_storage()
    return storage.resizable() and torch._C._storage_Use_Count(storage._cdata) <= 2  # the tensor, and `storage`


storage_at: Callable[[int], Any] = torch.UntypedStorage._new_with_weak_ptr
"""The memory at the address that a weak reference to it tells."""


def has_other_users(tensor: torch.Tensor) -> bool:
    """Whether something besides Python's own references uses `tensor` itself, such as an autograd graph."""
    return bool(weakref.getweakrefs(tensor)) or tensor._use_count() > 1  # type: ignore[attr-defined]


def tensor_of_class(cls: Any, data: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """A tensor of class `cls` with the memory of `data`."""
    return data if cls is torch.Tensor else torch.Tensor._make_subclass(cls, data, requires_grad)


def make_wrapper(cls: Any, meta: Any) -> torch.Tensor:
    """A tensor of class `cls` with the shape, strides, dtype and device of `meta` and no storage."""
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, meta.shape, strides=meta.stride, dtype=meta.dtype, device=meta.device, requires_grad=meta.requires_grad
    )


def fake_mode(*, is_symbolic: bool = False, symbols: Symbols | None = None) -> FakeTensorMode:
    """A mode in which tensors have no data; sizes that depend on data raise, or are symbols."""
    if not is_symbolic and symbols is None:
        return FakeTensorMode(allow_non_fake_inputs=True)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=(symbols or Symbols()).environment)


def put_module_apply(function: Any) -> Any:
    """Let `module.to`, `half` and the like go through `function`; returns what they went through before."""
    before: Any = torch.nn.Module._apply
    torch.nn.Module._apply = function
    return before


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it has no data."""
    return isinstance(tensor, FakeTensor)


SYMBOLS = threading.RLock()
"""Held while symbols are in use: sympy makes its constants at their first use, which is not safe among threads."""


class Symbols:
    """Symbols that stand for whole numbers in a run on fakes, and what the run has assumed of them."""

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # half a second

        self.environment: Any = ShapeEnv()
        self._made: list[tuple[Any, int]] = []

    def make(self, number: int, *, is_size: bool) -> Any:
        """Something that counts as `number` and stands for others; sizes of 0 and 1 stand for themselves only."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(f"number{len(self._made)}")
        make = self.environment.create_symbol if is_size else self.environment.create_unspecified_symbol
        symbol = make(number, source, DimDynamic.DYNAMIC)
        self._made.append((symbol, number))
        return self.environment.create_symintnode(symbol, hint=number, source=source)

    def function_of(self, results: list[Any]) -> Callable[[list[int]], tuple[int, ...] | None]:
        """What `results` (numbers, or what has been computed from symbols) are for other numbers.

        Returns:
            A function of the numbers for all symbols in the order of their making; it gives None where what the run
            has assumed does not hold.

        Raises:
            ValueError: They depend on data.
        """
        import sympy
        from torch.utils._sympy.printers import PythonPrinter

        write = PythonPrinter().doprint
        env, inputs = self.environment, {symbol for symbol, _ in self._made if isinstance(symbol, sympy.Symbol)}
        expressions = [item.node.expr if isinstance(item, torch.SymInt) else sympy.Integer(item) for item in results]
        assumed = [guard.expr for guard in env.guards]
        assumed += [sympy.Eq(symbol, other) for symbol, other in env.replacements.items()]
        for symbol in inputs:
            bounds = env.var_to_range[symbol]
            assumed += [symbol >= bounds.lower] if isinstance(bounds.lower, sympy.Integer) else []
            assumed += [symbol <= bounds.upper] if isinstance(bounds.upper, sympy.Integer) else []
        if env.deferred_runtime_asserts or any(item.free_symbols - inputs for item in (*expressions, *assumed)):
            raise ValueError("a number depends on data")
        names = ", ".join(str(symbol) if symbol in inputs else f"_{i}" for i, (symbol, _) in enumerate(self._made))
        tests = [f"({write(item)})" for item in assumed]
        tests += [f"_{i} == {number}" for i, (symbol, number) in enumerate(self._made) if symbol not in inputs]
        values = "".join(f"{write(item)}, " for item in expressions)
        text = f"lambda {names}: ({values}) if {' and '.join(tests) or True} else None"
        function = eval(text, {"math": math})
        return lambda numbers: function(*numbers)


def take_modes_of(recorder: Any) -> list[Any]:
    """Take the modes that record for `recorder` off this thread's function mode stack; `put_modes` puts all back."""
    stack = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
    for mode in reversed(stack):
        if getattr(mode, "recorder", None) is not recorder:
            _push_on_torch_function_stack(mode)
    return stack


def put_modes(stack: list[Any]) -> None:
    """Make the function mode stack what it was before `take_modes_of` returned `stack`."""
    for _ in range(_len_torch_function_stack()):
        _pop_torch_function_stack()
    for mode in reversed(stack):
        _push_on_torch_function_stack(mode)


@contextlib.contextmanager
def without_modes_of(recorder: Any) -> Iterator[None]:
    """Run the body without the modes that record for `recorder`."""
    stack = take_modes_of(recorder)
    try:
        yield
    finally:
        put_modes(stack)


@contextlib.contextmanager
def without_any_mode() -> Iterator[None]:
    """Run the body for real: no function mode and no dispatch mode, ours or the program's, sees what it does."""
    with DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def is_mode_active(kind: type) -> bool:
    """Whether a mode of class `kind` is on this thread's function mode stack."""
    stack = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
    for mode in reversed(stack):
        _push_on_torch_function_stack(mode)
    return any(isinstance(mode, kind) for mode in stack)


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
    """Whether torch was given one of our places ("rank:1", "rank:1/cuda:0") for a device."""
    return isinstance(error, RuntimeError) and re.search(r"device string: '?rank", str(error)) is not None


def is_fake_limit(error: BaseException) -> bool:
    """Whether a run on fake tensors failed because there were no data, or by torch's rules for fakes, which may be
    stricter than the real thing: only a real run can tell whether the user's call is wrong.
    """
    return (
        isinstance(error, _FAKE_LIMITS)
        or (isinstance(error, _FAKE_ERRORS) and any(words in str(error) for words in _FAKE_WORDS))
        or any(frame.f_code.co_filename == _FAKE_FILE for frame, _ in traceback.walk_tb(error.__traceback__))
    )


_FAKE_ERRORS = (RuntimeError, NotImplementedError, TypeError)
_FAKE_FILE = sys.modules[FakeTensorMode.__module__].__file__


def hooks_on_saved(node: Any, names: Sequence[str]) -> list[Any] | None:
    """The hooks through which a node of autograd gets what it keeps from its forward; None if that cannot be told."""
    hooks: list[Any] = []
    for name in names:
        saved: Any = getattr(node, f"_raw_saved_{name}", None)
        if not hasattr(saved, "unpack_hook"):
            return None
        hooks += [] if saved.unpack_hook is None else [saved.unpack_hook]
    return hooks


def shape_at(node: Any, number: int) -> Sequence[int]:
    """The shape of the gradient that a node of autograd takes as its input `number`."""
    return node._input_metadata[number].shape


def flops_of(operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """The floating-point operations of an aten operation with products in it; 0 for all others, and where a size is
    not a number.
    """
    count = flop_registry.get(operation._overloadpacket)
    found = 0 if count is None else count(*args, **kwargs, out_val=result)
    return found if isinstance(found, int) else 0


has_compatible_type: Any = torch._has_compatible_shallow_copy_type
unscale_: Any = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_: Any = torch._amp_update_scale_


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Let a tensor have been written to as often as `version` says: it is again what it was then."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


_saved_names: dict[type, list[str]] = {}


def saved_by(outputs: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """The tensors that the autograd graphs of `outputs` hold, and whether something is saved in a way that cannot be
    looked at: packed by hooks, or by a function that may run code of the forward again, as checkpoints do.

    What a normalisation in training mode saves of its running statistics counts as nothing: its backward never looks.
    """
    stack: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(stack)
    found: list[Any] = []
    is_packed = False
    while stack:
        node = stack.pop()
        names = _saved_names.get(type(node))
        if names is None:
            names = _saved_names[type(node)] = [name for name in dir(type(node)) if name.startswith("_raw_saved_")]
        is_in_training = getattr(node, "_saved_training", False) is True or getattr(node, "_saved_train", False) is True
        for name in names:
            if is_in_training and "running_" in name:
                continue
            for saved in tree_leaves(getattr(node, name)):
                is_packed |= saved.unpack_hook is not None
                found.append(saved.data)
        own = list(getattr(node, "__dict__", {}).values())
        is_packed |= any(map(callable, own))
        found += tree_leaves(own)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return [item for item in found if isinstance(item, torch.Tensor)], is_packed

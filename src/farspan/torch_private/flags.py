"""What torch keeps of what is around a call: the names for it are private, or may move. All of it is asked often."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _get_function_stack_at, _len_torch_dispatch_stack, _len_torch_function_stack
from torch.autograd import forward_ad
from torch.nn.modules import module as _modules
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = [
    "FLAGS",
    "is_compiled_wrapper",
    "has_full_backward_hooks",
    "call_container",
    "are_all_modules_hooked",
    "DeviceContext",
    "default_device",
    "dispatch_modes",
    "forward_hook_flags",
    "forward_hooks_of_all",
    "function_modes",
    "hooks_on_what_is_saved",
    "is_called_plainly",
    "is_nothing_around",
    "is_in_checkpoint",
    "is_of_a_checkpoint",
    "transformation",
    "without_hooks_on_what_is_saved",
]

_core: Any = torch._C


def _flag(name: str, setter: str = "") -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Returns how a flag of torch's core is read and set; nothing where this release has none of the name."""
    get, put = getattr(_core, f"_get_{name}", None), getattr(_core, f"_set_{setter or name}", None)
    return [] if get is None or put is None else [(get, put)]


FLAGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    *_flag("flash_sdp_enabled", "sdp_use_flash"),
    *_flag("mem_efficient_sdp_enabled", "sdp_use_mem_efficient"),
    *_flag("math_sdp_enabled", "sdp_use_math"),
    *_flag("cudnn_sdp_enabled", "sdp_use_cudnn"),
    *_flag("overrideable_sdp_enabled", "sdp_use_overrideable"),
    *_flag("sdp_priority_order"),
    *_flag("math_sdp_allow_fp16_bf16_reduction"),
    *_flag("cudnn_enabled"),
    *_flag("cudnn_benchmark"),
    *_flag("cudnn_deterministic"),
    *_flag("mkldnn_enabled"),
    *_flag("mkldnn_deterministic"),
    *_flag("nnpack_enabled"),
    *_flag("float32_matmul_precision"),
    *_flag("deterministic_fill_uninitialized_memory"),
    (torch.get_default_dtype, torch.set_default_dtype),
    (functools.partial(getattr, torch.backends.mha, "_is_fastpath_enabled"), torch.backends.mha.set_fastpath_enabled),
    (
        _core._get_deterministic_algorithms,
        lambda on: _core._set_deterministic_algorithms(on, warn_only=_core._get_deterministic_algorithms_warn_only()),
    ),
    (
        _core._get_deterministic_algorithms_warn_only,
        lambda warns: _core._set_deterministic_algorithms(_core._get_deterministic_algorithms(), warn_only=warns),
    ),
    (
        torch.is_anomaly_enabled,
        lambda on: torch.set_anomaly_enabled(on, torch.is_anomaly_check_nan_enabled()),
    ),
    (
        torch.is_anomaly_check_nan_enabled,
        lambda checks: torch.set_anomaly_enabled(torch.is_anomaly_enabled(), checks),
    ),
]
"""Settings that change how operations compute: how to read each, and how to set it."""


def function_modes() -> Iterator[Any]:
    """Returns the function modes of this thread, the innermost last."""
    return map(_get_function_stack_at, range(_len_torch_function_stack()))


def dispatch_modes() -> list[Any]:
    """Returns the dispatch modes of this thread that look at what is computed, but for those of a checkpoint."""
    if not _len_torch_dispatch_stack():
        return []
    return [mode for mode in _get_current_dispatch_mode_stack() if type(mode).__module__ != _CHECKPOINT]


hooks_on_what_is_saved: Callable[[], tuple[Any, Any] | None] = functools.partial(
    _core._autograd._top_saved_tensors_default_hooks, True
)
"""(pack, unpack) of the innermost `saved_tensors_hooks`."""


@contextlib.contextmanager
def without_hooks_on_what_is_saved() -> Iterator[None]:
    """Run the body without any `saved_tensors_hooks` that are around it."""
    around: list[tuple[Any, Any]] = []
    while (hooks := hooks_on_what_is_saved()) is not None:
        around.append(hooks)
        _core._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(around):
            _core._autograd._push_saved_tensors_default_hooks(*hooks)


def is_of_a_checkpoint(hooks: tuple[Any, Any]) -> bool:
    """Returns whether torch's checkpoint has set these hooks on saved tensors."""
    return getattr(hooks[0], "__module__", "") == _CHECKPOINT


def is_in_checkpoint() -> bool:
    """Returns whether the program is in a part that torch's checkpoint would compute again."""
    hooks = hooks_on_what_is_saved()
    return hooks is not None and is_of_a_checkpoint(hooks)


_CHECKPOINT = "torch.utils.checkpoint"


def is_nothing_around() -> bool:
    """Returns whether there is neither a dispatch mode nor a transformation of `torch.func`."""
    is_plain = _core._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0
    return is_plain and not _len_torch_dispatch_stack()


def is_called_plainly(recorder: Any) -> bool:
    """Returns whether a module is called as nearly always: without hooks on all modules, outside of
    `parametrize.cached()`, with nothing around, and under no function mode but one that records for `recorder`. One
    function asks all that, for it is asked at every call.
    """
    return (
        _len_torch_function_stack() == 1
        and not _modules._global_backward_hooks
        and not _modules._global_backward_pre_hooks
        and not _modules._global_forward_hooks
        and not _modules._global_forward_pre_hooks
        and not parametrize._cache_enabled
        and not _len_torch_dispatch_stack()
        and forward_ad._current_level < 0
        and _core._functorch.peek_interpreter_stack() is None
        and getattr(_get_function_stack_at(0), "recorder", None) is recorder
    )


def transformation() -> str | None:
    """Returns the innermost transformation of `torch.func` that is running: "grad", "vmap", "jvp" (dual numbers too),
    ..."""
    interpreter: Any = _core._functorch.peek_interpreter_stack()
    if interpreter is not None:
        return str(interpreter.key()).rpartition(".")[2].lower()
    return "jvp" if forward_ad._current_level >= 0 else None


def default_device() -> torch.device | None:
    """Returns the device that `with torch.device(...)` or `torch.set_default_device` names; None where neither is
    used."""
    for number in range(_len_torch_function_stack() - 1, -1, -1):  # no list of them: asked for at every call
        mode = _get_function_stack_at(number)
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def call_container(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module whose code is to be recorded, which torch.compile cannot trace: what it was compiled from runs."""
    if is_compiled_wrapper(module):
        return module._modules["_orig_mod"](*args, **kwargs)  # type: ignore[misc]
    return module._call_impl(*args, **kwargs)


def is_compiled_wrapper(module: torch.nn.Module) -> bool:
    """Returns whether `module` is what `torch.compile(module)` has returned."""
    return type(module).__module__.startswith("torch._dynamo")


def are_all_modules_hooked() -> bool:
    """Returns whether there are hooks on all modules: full backward hooks, or forward hooks."""
    return _have_all_full_backward_hooks() or bool(_modules._global_forward_hooks or _modules._global_forward_pre_hooks)


def has_full_backward_hooks(module: torch.nn.Module) -> bool:
    """Returns whether `module` has hooks on the gradients of its inputs and outputs, those of all modules included."""
    has_full = bool(module._backward_hooks) and module._is_full_backward_hook is not False
    return has_full or bool(module._backward_pre_hooks) or _have_all_full_backward_hooks()


def _have_all_full_backward_hooks() -> bool:
    has_full = bool(_modules._global_backward_hooks) and _modules._global_is_full_backward_hook is True
    return has_full or bool(_modules._global_backward_pre_hooks)


def forward_hooks_of_all() -> tuple[dict[int, Any], dict[int, Any]]:
    """Returns torch's own tables of the hooks before and after the forward of all modules."""
    return _modules._global_forward_pre_hooks, _modules._global_forward_hooks


def forward_hook_flags(key: int) -> tuple[bool, bool]:
    """Returns of a hook after the forward of all modules whether it takes keyword arguments, and is always called."""
    return key in _modules._global_forward_hooks_with_kwargs, key in _modules._global_forward_hooks_always_called

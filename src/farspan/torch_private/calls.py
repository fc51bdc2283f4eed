"""Calling modules below what torch puts around them (compiled ones, checkpoints), and which torch it is."""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.modules.module as _modules
import torch.optim.optimizer as _optimizers
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.nn.utils import parametrize

__all__ = [
    "parse_to",
    "replace_apply",
    "NAMES_A_STRETCH",
    "call_without_compiling",
    "check_release",
    "compile_what_it_calls",
    "compiling_nothing",
    "is_caching_parametrizations",
    "is_compiled",
    "is_hook_of_all_modules",
    "not_passed_on",
    "put_module_apply",
    "recompute_through",
    "call_inside_step_hooks",
    "forget_inside_step_hooks",
    "has_step_hooks",
    "load_between_hooks",
    "watch_backward_hooks",
]


def call_without_compiling(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module, hooks and all, but for what `module.compile()` put in front."""
    return module._call_impl(*args, **kwargs)


def not_passed_on(function: Any) -> dict[str, Any]:
    """Returns the arguments that torch keeps from function modes, of a function that has just been called."""
    if function is not torch.nn.functional.l1_loss:
        return {}
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    weight = None if frame is None else frame.f_locals.get("weight")
    return {} if weight is None else {"weight": weight}


NAMES_A_STRETCH: frozenset[Any] = frozenset(
    [
        torch.ops.profiler._record_function_enter_new,
        torch.ops.profiler._record_function_exit._RecordFunction,
    ]
)
"""What `torch.profiler.record_function` calls, as around each step of an optimizer: it has nothing to do with data."""


_INSIDE: Any = "farspan"
"""The key of what is called inside the hooks of an optimizer: theirs are numbers."""


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether hooks are called around its steps, beside one before and one after those of all optimizers."""
    of_all = max(len(_optimizers._global_optimizer_pre_hooks), len(_optimizers._global_optimizer_post_hooks))
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return of_all > 1 or any(len(each) > (_INSIDE in each) for each in hooks)


def call_inside_step_hooks(
    optimizer: torch.optim.Optimizer, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    """Let the step that has begun to call its hooks call `before` as the last of those before it, and `after` as the
    first of those after it, as hooks are called.
    """
    forget_inside_step_hooks(optimizer)
    first: Any = optimizer._optimizer_step_pre_hooks
    last: Any = optimizer._optimizer_step_post_hooks
    others = dict(last)  # wrappers of optimizers have plain dictionaries here
    last.clear()
    first[_INSIDE], last[_INSIDE] = before, after
    last.update(others)


def forget_inside_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Undo `call_inside_step_hooks`, once all hooks of the optimizer itself have been called."""
    optimizer._optimizer_step_pre_hooks.pop(_INSIDE, None)
    optimizer._optimizer_step_post_hooks.pop(_INSIDE, None)


def load_between_hooks(
    optimizer: torch.optim.Optimizer, state_dict: Any, load: Callable[[Any], None], *, calls_first: bool
) -> None:
    """Call `load` with a state dictionary, and around it the hooks of `load_state_dict`, which then calls none itself.

    Args:
        optimizer: It is loaded.
        state_dict: What hooks before it see, and may change.
        load: Loads it.
        calls_first: Whether these are called, beside those after it.
    """
    first, last = optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks
    if calls_first and first:
        state_dict = state_dict.copy()
        for hook in first.values():
            changed = hook(optimizer, state_dict)
            state_dict = state_dict if changed is None else changed
    none = OrderedDict[Any, Any]()
    vars(optimizer).update(_optimizer_load_state_dict_pre_hooks=none, _optimizer_load_state_dict_post_hooks=none)
    try:
        load(state_dict)
    finally:
        vars(optimizer).update(_optimizer_load_state_dict_pre_hooks=first, _optimizer_load_state_dict_post_hooks=last)
    for hook in last.values():
        hook(optimizer)


def is_caching_parametrizations() -> bool:
    """Returns whether the program is in `torch.nn.utils.parametrize.cached()`."""
    return bool(parametrize._cache_enabled)


def compile_what_it_calls(function: Any) -> None:
    """Let Dynamo compile what `function` calls, and never the frame of `function` itself."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


def compiling_nothing() -> contextlib.AbstractContextManager[Any]:
    """Let what is compiled run as it is written in the body, and Dynamo learn nothing from the run."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled; to load it takes seconds
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns whether calling `module` runs what torch.compile has made of it."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def recompute_through(
    wrapper: Callable[[Any], Any],
    is_recorded: Callable[[Any], bool],
    around: Callable[[Any], contextlib.AbstractContextManager[None]],
) -> None:
    """Makes non-reentrant checkpoints recompute with `wrapper(function)`, made when they run `function`.

    Args:
        wrapper: Takes what the checkpoint runs.
        is_recorded: Whether what runs on an argument is recorded: it is not computed again, and need not know the
            generators' states.
        around: Gives the context of each first run of a function.
    """
    import torch.utils.checkpoint as checkpoint

    name = "_checkpoint_without_reentrant_generator_impl"  # since torch 2.14
    if not hasattr(checkpoint, name):
        name = "_checkpoint_without_reentrant_generator"
    original: Any = getattr(checkpoint, name)

    def generator(function: Any, preserve_rng_state: bool = True, *args: Any, **kwargs: Any) -> Any:
        keeps_states = preserve_rng_state and not any(map(is_recorded, args))
        with around(function):
            yield from original(wrapper(function), keeps_states, *args, **kwargs)

    def generator_of_arguments(
        function: Any, args: Any, kwargs: Any, *, preserve_rng_state: bool = True, **ways: Any
    ) -> Any:
        keeps_states = preserve_rng_state and not any(map(is_recorded, args))
        with around(function):
            yield from original(wrapper(function), args, kwargs, preserve_rng_state=keeps_states, **ways)

    arguments = inspect.signature(original).parameters[
        "args"
    ]  # since torch 2.14.1 a tuple, as `kwargs` is a dictionary
    takes_all = arguments.kind is inspect.Parameter.VAR_POSITIONAL
    setattr(checkpoint, name, generator if takes_all else generator_of_arguments)


def put_module_apply(function: Any) -> Any:
    """Let `module.to`, `half` and the like go through `function`; returns what they went through before."""
    before: Any = torch.nn.Module._apply
    torch.nn.Module._apply = function
    return before


def is_hook_of_all_modules(hook: Any) -> bool:
    """Returns whether it is a full backward hook on all modules."""
    has_full = _modules._global_is_full_backward_hook is True
    full = _modules._global_backward_hooks.values() if has_full else ()
    return any(hook is other for other in (*full, *_modules._global_backward_pre_hooks.values()))


def watch_backward_hooks(watched: Callable[[torch.nn.Module, Any], Any]) -> None:
    """Let modules call `watched(module, hook)` for each of their backward hooks, those of all modules included, and
    nothing where it gives None.
    """
    get_hooks, get_pre_hooks = torch.nn.Module._get_backward_hooks, torch.nn.Module._get_backward_pre_hooks

    def of_module(module: torch.nn.Module) -> Any:
        return tuple(watched_of(module, hooks) for hooks in get_hooks(module))

    def before_module(module: torch.nn.Module) -> Any:
        return watched_of(module, get_pre_hooks(module))

    def watched_of(module: torch.nn.Module, hooks: Any) -> list[Any]:
        return [hook for hook in [watched(module, hook) for hook in hooks] if hook is not None]

    torch.nn.Module._get_backward_hooks = of_module  # type: ignore[method-assign]
    torch.nn.Module._get_backward_pre_hooks = before_module  # type: ignore[method-assign]


_OLDEST, _NEWEST = (2, 11), (2, 15)
"""The releases of torch that farspan's tests have run on."""


def check_release() -> None:
    """Warn where torch is of another release."""
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    if not _OLDEST <= release <= _NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (_OLDEST, _NEWEST))
        warnings.warn(
            f"farspan has been tried with torch {oldest} to {newest}; this is torch {torch.__version__}.", stacklevel=2
        )


def replace_apply(make: Callable[[Any], Any]) -> None:
    """Let `nn.Module._apply`, through which `model.to(...)` and its like go, be what `make` makes of it."""
    torch.nn.Module._apply = make(torch.nn.Module._apply)  # type: ignore[method-assign]


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool, Any]:
    """Returns the device, the dtype, whether not to wait, and the memory format of arguments of `torch.Tensor.to`."""
    return torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]

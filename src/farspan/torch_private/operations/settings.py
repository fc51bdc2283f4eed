"""What an operation depends on besides its arguments, and how to do one as it was to be done before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from farspan.torch_private.mode_stack import without_any_mode

__all__ = ["Settings", "alone", "settings_now"]

_core: Any = torch._C
_TRACER = _core.DispatchKeySet(_core._parse_dispatch_key("Tracer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What kernels choose by.

    Attributes:
        default_dtype: Of numbers alone.
        is_grad_enabled: Whether torch's grad mode is on (recurrent layers of oneDNN).
        is_deterministic: Whether only algorithms are allowed that always give the same; their sums are others.
        warns_only: Whether torch only warns where there is no such algorithm.
        fills_empty: Whether these fill memory that has not been written yet.
    """

    default_dtype: torch.dtype
    is_grad_enabled: bool
    is_deterministic: bool
    warns_only: bool
    fills_empty: bool

    def put(self) -> None:
        """Let these be the settings from now on."""
        if torch.get_default_dtype() != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        _core._set_grad_enabled(self.is_grad_enabled)
        _core._set_deterministic_algorithms(self.is_deterministic, warn_only=self.warns_only)
        _core._set_deterministic_fill_uninitialized_memory(self.fills_empty)


def settings_now() -> Settings:
    """Returns the settings of this thread and process."""
    return Settings(
        default_dtype=torch.get_default_dtype(),
        is_grad_enabled=torch.is_grad_enabled(),
        is_deterministic=_core._get_deterministic_algorithms(),
        warns_only=_core._get_deterministic_algorithms_warn_only(),
        fills_empty=_core._get_deterministic_fill_uninitialized_memory(),
    )


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Run the body as if nothing of the program were around it, and put the settings back after it.

    Modes, autocast, tracing and the transformations of `torch.func` do not see what it does.
    """
    functorch = _core._functorch
    transformations: list[Any] = []
    settings = settings_now()
    try:
        while functorch.peek_interpreter_stack() is not None:
            transformations.append(functorch.pop_dynamic_layer_stack())
        with without_any_mode(), _core._DisableAutocast(), _core._ExcludeDispatchKeyGuard(_TRACER):
            yield
    finally:
        for each in reversed(transformations):
            functorch.push_dynamic_layer_stack(each)
        settings.put()

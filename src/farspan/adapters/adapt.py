"""Registers which module of which package has an adapter, and adapts it when it is imported."""

from __future__ import annotations

from farspan.adapters import accelerate, lightning, safetensors, transformers
from farspan.adapters.hook import when_imported

__all__ = ["adapt_trainers"]

_is_adapted = False


def adapt_trainers() -> None:
    """Adapt the packages that are loaded, and the others as soon as they are; once in a process.

    Raises:
        PlanError: A trainer has already split the data or wrapped the model.
    """
    global _is_adapted
    if _is_adapted:
        return
    for adapter in (safetensors, accelerate, transformers, lightning):
        for name, adapt in adapter.ADAPTERS.items():
            when_imported(name, adapt)
    _is_adapted = True

"""Which releases of torch these private names have been tried with."""

from __future__ import annotations

import warnings

import torch

__all__ = ["check_release"]

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

"""The protocol by which groups do things together; `Recovery` says what each method means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

__all__ = ["Operations"]

_T = TypeVar("_T")


class Operations(Protocol):
    """Operations of all groups that end on all ranks that are left or on none."""

    def begin(self, digest: int) -> None: ...
    def commit(self, complete: Callable[[], None], again: Callable[[], None]) -> None: ...
    def together(self, act: Callable[[], _T]) -> _T: ...

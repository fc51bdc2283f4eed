"""The data axis of a program whose ranks are one group: nothing is averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.graph import Graph
    from farspan.program.program import Program

__all__ = ["Groups", "OneGroup"]


class Groups(Protocol):
    """The protocol of the data axis, as the engine uses it; `Reduction` says what each method means."""

    number: int
    num_groups: int
    first_num_groups: int
    """Number of groups at the start; some may be lost."""

    @property
    def is_due(self) -> bool: ...
    @property
    def has_begun(self) -> bool: ...
    @property
    def outlives_losses(self) -> bool: ...
    def share_weights(self, items: Sequence[Placed]) -> None: ...
    def note(
        self, graphs: Sequence[Graph], program: Program, data: Callable[[], tuple[int, ...]], *, ends_window: bool
    ) -> None: ...
    def touch(self, placed: Placed) -> None: ...
    def end_window(self, *, has_passed_barrier: bool) -> None: ...
    def mean(self, result: Any) -> Any: ...
    def refuse_losses(self, why: str) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


class OneGroup:
    """The data axis of a world with one group: all ranks."""

    number = 0
    num_groups = first_num_groups = 1
    is_due = False
    has_begun = False
    outlives_losses = False

    def share_weights(self, items: Sequence[Placed]) -> None: ...
    def note(
        self, graphs: Sequence[Graph], program: Program, data: Callable[[], tuple[int, ...]], *, ends_window: bool
    ) -> None: ...
    def touch(self, placed: Placed) -> None: ...
    def end_window(self, *, has_passed_barrier: bool) -> None: ...
    def refuse_losses(self, why: str) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...

    def mean(self, result: Any) -> Any:
        return result

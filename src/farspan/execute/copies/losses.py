"""What ranks do together, which a loss may interrupt; `Keeper` says what each method means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from farspan.call.leaf import Placed
    from farspan.execute.step.end import StepEnd
    from farspan.graph import Graph
    from farspan.program.options import Settings
    from farspan.program.program import Program

__all__ = ["Losses", "Ran"]

Ran: TypeAlias = "tuple[StepEnd, Program, Settings]"
"""A step that this rank has run: its end, and the program of it, with its settings."""
_T = TypeVar("_T")


class Losses:
    """What the engine does together with other ranks: by itself, all end when one is lost.

    Args:
        engine: This rank's.
    """

    may_be_outlived = False

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def settle(self) -> None: ...

    def has_interrupted(self, error: Exception) -> bool:
        return False

    def outlived(self, graphs: Sequence[Graph], run: Callable[[], Ran], *, is_resolving: bool) -> Ran:
        return run()

    def has_raised(self) -> None: ...

    def agree(self, step: int, digest: int) -> None:
        self._engine.side.start(step, digest)
        self._engine.side.wait_agreed(step, self._engine.deadline_s)

    def asking(self, ask: Callable[[], _T]) -> _T:
        return ask()

    def finish(self, finish: Callable[[], None]) -> None:
        finish()

    def clear_gradients(self, items: Sequence[Placed]) -> None: ...
    def change_gradients(self) -> None: ...
    def change(self) -> None: ...
    def change_state(self, optimizer: Optimizer) -> None: ...
    def step(self, optimizer: Optimizer, placed: Sequence[Placed], *, has_closure: bool) -> None: ...

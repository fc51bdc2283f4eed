"""The protocol between the parts of the engine: each takes a `Running`, which the engine fulfils."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.control.channel import SideChannel
    from farspan.execute.agreement.agreement import Agreement
    from farspan.execute.data_axis.one_group import Groups
    from farspan.execute.gradient_masks import GradientMasks
    from farspan.execute.process.console import Console
    from farspan.execute.step.executor import Executor
    from farspan.execute.step.pace import Pace
    from farspan.execute.values import SharedValues
    from farspan.graph import Graph, Value
    from farspan.plan import Team
    from farspan.program.program import Program
    from farspan.record.recorder import Recorder

__all__ = ["Running"]


class Running(Protocol):
    """The runtime of one rank, as its parts see it. `Engine` says what each attribute is."""

    rank: int
    deadline_s: float
    recorder: Recorder
    side: SideChannel
    teams: list[Team]
    parameters: dict[str, Placed]
    executor: Executor
    pace: Pace
    agreement: Agreement
    values: SharedValues
    console: Console
    masks: GradientMasks
    groups: Groups
    after_step: list[Callable[[], None]]
    after_abort: list[Callable[[], None]]

    def check(self) -> None: ...
    def average_gradients(self, *, has_passed_barrier: bool) -> None: ...
    def barrier(self, what: str) -> None: ...
    def executing(self) -> AbstractContextManager[None]: ...
    def is_mine(self, value: Value) -> bool: ...
    def owner_of(self, value: Value) -> int: ...
    def parameters_changed(self, *, in_step: bool = False) -> None: ...
    def settle(self, graphs: Sequence[Graph], program: Program) -> None: ...

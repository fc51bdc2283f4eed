"""The protocol of what records operations on split stages, for the rules of single ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from farspan.record.team.team_tensor import Splits, SplitStage, TeamTensor

if TYPE_CHECKING:
    from farspan.graph import Meta
    from farspan.record.recording import Recording
    from farspan.record.team.matrices import Matrices

__all__ = ["Rules"]


class Crossings(Protocol):
    """What members of split stages have of tensors from elsewhere."""

    def moved(self, x: TeamTensor, split: SplitStage) -> TeamTensor: ...


class Rules(Splits, Protocol):
    """The recorder of split stages, as far as the rule of a single operation may use it."""

    recorder: Recording
    matrices: Matrices
    stages: dict[int, SplitStage]
    current: SplitStage | None

    @property
    def crossings(self) -> Crossings: ...
    def meta_of(self, item: Any) -> Meta: ...
    def record(self, function: Any, args: tuple[Any, ...], stage: int, kwargs: dict[str, Any] | None = None) -> Any: ...
    def operand(self, item: Any, dim: int | None, split: SplitStage, sections: int) -> Sequence[Any]: ...

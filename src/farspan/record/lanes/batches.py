"""Keeps what a recorder knows of batches that are cut into lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Batches", "CutsBatches", "Lanes", "NotInLanesError"]


class Lanes(Protocol):
    """The lanes of one batch. `Window` says what each member is."""

    sizes: tuple[int, ...]

    @property
    def is_open(self) -> bool: ...

    recorder: Any
    graphs: list[Any]

    def can_use(self, tensors: Sequence[Any]) -> bool: ...
    def record(self, lanes: Sequence[Callable[[], Any]]) -> list[Any]: ...
    def inside(self, number: int) -> AbstractContextManager[None]: ...
    def dispatch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def backward(self, roots: Any, given: Any, retain_graph: Any, create_graph: Any, inputs: Any) -> bool: ...


class CutsBatches(Protocol):
    """A model whose batches are cut. `BatchedModel` says what each member is."""

    reasons: dict[str, None]
    is_random: bool
    precision: float

    @property
    def is_cut(self) -> bool: ...
    def note_part(self, module: Any) -> None: ...
    def call(self, recorder: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


class NotInLanesError(Exception):
    """A model cannot be recorded in lanes; says why."""


@dataclass(slots=True)
class Batches:
    """The batches of one recorder's models.

    Attributes:
        models: By id of a model what cuts its batches; other models are called as they are.
        window: The lanes of the last batch.
        is_inside: Whether a model is being called, as a whole or for one lane.
        counts: While a lane is recorded of a model that makes its loss itself: what the mean of each loss is divided
            by, which the lane leaves out; None for a sum.
        has_numbers: Whether anything is computed. Where it is not, rules alone say that a batch may be cut.
        is_number_chosen: Whether the number of lanes is not the program's to say: it has asked for "auto".
        unseen: The ids of models that are called as they are, and have not been trained yet.
        has_rows: Of each of the others, whether the tensors of its first training call seem to be a batch of rows.
    """

    models: dict[int, CutsBatches] = field(default_factory=dict[int, CutsBatches])
    window: Lanes | None = None
    is_inside: bool = False
    counts: list[float | None] | None = None
    has_numbers: bool = True
    is_number_chosen: bool = False
    unseen: set[int] = field(default_factory=set[int])
    has_rows: list[bool] = field(default_factory=list[bool])

    @property
    def may_be_cut(self) -> bool:
        """Returns whether more lanes may be worth trying: that has not been tried in vain, nor chosen, and batches seem
        to have rows."""
        is_whole = any(model.reasons and not model.is_cut for model in self.models.values())
        has_none = bool(self.has_rows) and not any(self.has_rows) and not self.models
        return not (self.is_number_chosen or is_whole or has_none)

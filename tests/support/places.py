"""Programs that name places, against the same programs without them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tests.support.plainly import assert_same_as_plainly
from torch import Tensor, nn

import farspan
from farspan.execute.engine import Engine
from farspan.execute.process.world import current_engine
from farspan.record.parameters.copying import plan_by_model

__all__ = ["Named", "engine", "rank_of", "ranks", "same_with_places"]


def engine() -> Engine:
    found = current_engine()
    assert found is not None
    return found


def rank_of(tensor: Any) -> int:
    """The rank that a recorded tensor lives on."""
    return engine().teams[tensor._value.stage].leader.rank


class Named(nn.Module):
    """Knows for each of its places the rank's name; None where the program runs plainly."""

    places: tuple[str, ...] = ()

    def on(self, number: int) -> Any:
        return farspan.on(self.places[number]) if self.places else contextlib.nullcontext()

    def moved(self, x: Tensor, number: int) -> Tensor:
        return x.to(self.places[number]) if self.places else x

    def is_at(self, x: Tensor, number: int) -> bool:
        return not self.places or rank_of(x) == int(self.places[number].split("/")[0][5:])


def same_with_places(
    build: Callable[[], Named], program: Callable[[Any], Any], num_ranks: int, places: tuple[str, ...], **options: Any
) -> None:
    """`program` gives with places on `num_ranks` ranks what it gives without on none."""

    def build_for_all() -> nn.Module:
        return build()

    def placed(model: Any) -> Any:
        if model in plan_by_model:
            model.places = places
        return program(model)

    assert_same_as_plainly(build_for_all, placed, num_ranks, **options)


def ranks(num_ranks: int, *wanted: int) -> tuple[str, ...]:
    return tuple(f"rank:{min(rank, num_ranks - 1)}" for rank in wanted)

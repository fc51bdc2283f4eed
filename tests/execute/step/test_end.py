"""Which results are sent to every rank at the end of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from farspan.execute.step.end import _scalars_of
from farspan.graph import Meta, Value


def test_numbers_are_for_every_rank_unless_something_larger_is_made_of_them() -> None:
    def of(*shape: int) -> Value:
        return Value(Meta(shape, (1,) * len(shape), torch.float32, torch.device("cpu"), False), 0)

    def call(outputs: tuple[Value, ...], *arguments: Value) -> Any:
        return SimpleNamespace(outputs=outputs, arguments=arguments)

    scale, scaled, loss, least, place = of(), of(4), of(), of(1), of(1)
    calls = [call((scale,)), call((scaled,), of(4), scale), call((loss,), scaled), call((least, place), scaled)]
    graph: Any = SimpleNamespace(segments=[SimpleNamespace(calls=calls)])
    assert _scalars_of([graph]) == [loss, least, place]

"""Tensors that single ranks have come to all: small ones on the side channel, large ones from their owners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.ranks import run_threads
from tests.support.side import count_hub_bytes

from farspan.errors import RecordError
from farspan.execute.agreement.broadcast import broadcast_tensors
from farspan.execute.process.world import current_engine

SHAPES = ((), (7,), (300, 300), (0,), (5, 2), (20_000,))
OWNERS = (0, 1, 2, 0, 1, 1)


def _filled(rank: int) -> list[torch.Tensor]:
    return [torch.full(shape, float(10 * rank + number)) for number, shape in enumerate(SHAPES)]


def _broadcast(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    engine = current_engine()
    assert engine is not None
    broadcast_tensors(engine, "a test", tensors, OWNERS[: len(tensors)])
    assert engine.values.offered == {}
    return tensors


def test_every_rank_has_each_tensor_of_its_owner_and_no_large_one_passes_the_hub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub_bytes = count_hub_bytes(monkeypatch)
    for found in run_threads(3, lambda rank: _broadcast(_filled(rank))):
        expected = [_filled(owner)[number] for number, owner in enumerate(OWNERS)]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert hub_bytes[0] < 1_000  # the large ones have 440 KB


def test_tensors_of_other_strides_are_written_into_as_they_are() -> None:
    def program(rank: int) -> Any:
        return _broadcast([torch.full((8, 6), float(rank)).T, torch.full((200, 100), float(rank)).T])

    for small, large in run_threads(2, program):
        assert small.tolist() == torch.zeros(6, 8).tolist() and large.tolist() == torch.ones(100, 200).tolist()
        assert (small.stride(), large.stride()) == ((1, 6), (1, 100))


def test_a_large_tensor_of_another_shape_is_not_taken() -> None:
    with pytest.raises(RecordError, match=r"a test: torch.float32\[30000\], not torch.float32\[20000\]"):
        run_threads(2, lambda rank: _broadcast([torch.zeros(20_000 if rank else 30_000)]))

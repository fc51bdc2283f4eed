"""Bounded memory: boundary buffers follow what is in flight, not the number of micro-batches."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.execute.process.world import current_engine

WIDTH = 200  # a boundary tensor of [100, 200] floats is large enough to travel alone


class Chain(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class CountedBuffers:
    """Receive buffers whose memory is watched: alive until the last tensor that shares it has gone."""

    def __init__(self) -> None:
        self.alive = 0
        self.most = 0
        self.total = 0

    def allocate(self, size: int, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        memory = np.empty(size * dtype.itemsize, dtype=np.uint8)
        self.alive += 1
        self.total += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(memory, self.release)
        return torch.from_numpy(memory).view(dtype)

    def release(self) -> None:
        self.alive -= 1


def most_buffers(num_ranks: int, num_micro_batches: int, *, is_training: bool) -> list[CountedBuffers]:
    torch.manual_seed(0)
    models = [Chain(2 * num_ranks) for _ in range(num_ranks)]

    def program(rank: int) -> CountedBuffers:
        model = farspan.distribute(models[rank])
        engine = current_engine()
        assert engine is not None
        counted = CountedBuffers()
        engine.channels.allocate = counted.allocate
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            if is_training:
                for _ in range(num_micro_batches):
                    model(torch.ones(100, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with torch.no_grad():
                    outputs = [model(torch.ones(100, WIDTH)).sum() for _ in range(num_micro_batches)]
                farspan.flush()
                assert len({output.item() for output in outputs}) == 1
        return counted

    gc.disable()  # what is freed late by the collector would count as alive
    try:
        return run_threads(num_ranks, program)
    finally:
        gc.enable()


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("num_micro_batches", [4, 64])
def test_boundary_buffers_are_bounded_by_stages_and_lookahead(
    num_ranks: int, num_micro_batches: int, is_training: bool
) -> None:
    for rank, counted in enumerate(most_buffers(num_ranks, num_micro_batches, is_training=is_training)):
        receives = (rank > 0) + (rank < num_ranks - 1 and is_training)
        assert counted.total >= receives * num_micro_batches, "the test must see every buffer"
        assert counted.most <= num_ranks + 2, f"rank {rank}: {counted.most} buffers alive at once"
        assert counted.alive == 0, f"rank {rank}: {counted.alive} buffers are never freed"

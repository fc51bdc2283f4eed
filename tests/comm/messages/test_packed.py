"""The tensors of one message, of which small ones travel together: they arrive as they were sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.comm.local import LocalNetwork, LocalTransport
from tests.comm.test_nccl import Side

from farspan.call.infer.entry import meta_of
from farspan.comm.channels import Channels
from farspan.comm.router import Router
from farspan.graph import Value
from farspan.plan import Worker
from farspan.program.program import Channel, Message

SHAPES = (
    ("float32", (100,)), ("bool", (3,)), ("float64", (3, 5)), ("int8", ()), ("complex128", (7,)), ("bfloat16", (11, 3)),
    ("float32", (0, 4)), ("float32", (300, 400)), ("uint8", (1,)),
)  # fmt: skip


def made(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    found = torch.randint(0, 2, (*shape, kind.itemsize), dtype=torch.uint8).view(kind)
    return found.view(torch.bool).reshape(shape) if kind is torch.bool else found.reshape(shape)


@pytest.mark.parametrize("begin", range(len(SHAPES)))
def test_tensors_of_all_types_and_sizes_arrive_together_as_they_were(begin: int) -> None:
    torch.manual_seed(begin)
    with_gaps = torch.rand(6, 4).t()[::2]
    tensors = [with_gaps, *(made(*each) for each in (*SHAPES[begin:], *SHAPES[:begin]))]
    network, side = LocalNetwork(), Side()
    ends: list[Any] = [Channels(Router(LocalTransport(rank, network), None), rank, 60.0, side) for rank in range(2)]  # type: ignore[arg-type]
    metas = [meta_of(tensor) for tensor in tensors]
    values = [Value(meta, number, name=f"value {number}") for number, meta in enumerate(metas)]
    message = Message(3, Channel(Worker(0, "cpu"), Worker(1, "cpu"), 0), values)
    ends[1].post(message, metas, torch.device("cpu"))
    ends[0].send(message, tensors, metas)
    ends[1].wait(message, metas, lambda: "rank 1")
    for tensor, arrived in zip(tensors, message.tensors, strict=True):
        assert arrived.dtype is tensor.dtype and arrived.stride() == tensor.stride()
        assert arrived.equal(tensor)

"""A role that reads: one process loads batches ahead, the learner's ranks get them by `farspan.from_rank`.

farspan run --role loader=1 --role learner=2 examples/loader_role.py
python examples/loader_role.py                                            the same numbers, in one process
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farspan

NUM_AHEAD = 3


class Reader:
    """Hands out the batches of a loader, one by one; None at the end."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._batches = iter(loader)

    def read(self) -> Any:
        return next(self._batches, None)


def make_loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(160, 8, generator=generator)
    return DataLoader(
        TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True, generator=generator
    )


def batches_of(name: str) -> Iterator[Any]:
    """Yields on every rank what the reader reads; the first rank asks for some batches ahead."""
    read = farspan.service(name).future.read if farspan.rank() == 0 else None
    ahead = collections.deque(read() for _ in range(NUM_AHEAD)) if read is not None else None
    while True:
        batch = ahead.popleft().result() if ahead is not None else None
        batch = farspan.from_rank(0, batch)
        if batch is None:
            return
        if read is not None and ahead is not None:
            ahead.append(read())
        yield batch


def main() -> None:
    if farspan.role() == "loader":
        farspan.expose("batches", Reader(make_loader())).wait()
    torch.manual_seed(0)
    model = farspan.distribute(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, targets in batches_of("batches") if farspan.role() else make_loader():
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())


if __name__ == "__main__":
    main()

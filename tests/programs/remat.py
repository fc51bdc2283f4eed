"""One rank: trains models of several kinds with activations computed again, and prints what each training gave.

python remat.py null '["blocks.*"]'        what `remat=` is in each of the trainings; null is the plain loop
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farspan

__all__: list[str] = []

_generator = torch.Generator().manual_seed(11)
X = torch.randn(6, 8, generator=_generator)
Y = torch.randint(5, (6,), generator=_generator)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.norm(self.a(x))))


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.4, self.training)


class Picking(Block):
    """How much it computes depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.sum(1) > 0).nonzero()[:, 0]
        return x.index_add(0, rows, torch.tanh(self.b(self.a(x[rows]).exp())))


class Frozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.norm.requires_grad_(False)


class Net(nn.Module):
    def __init__(self, make: Any, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make() for _ in range(num_blocks)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class InAutocast(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


def compiled() -> Any:
    return torch.compile(Block(), backend="aot_eager")


def compiled_in_place() -> Block:
    block = Block()
    block.compile(backend="aot_eager")
    return block


MODELS = {
    "batchnorm": lambda: Net(Block),
    "dropout": lambda: Net(Dropping),
    "autocast": lambda: InAutocast(Block),
    "nonzero": lambda: Net(Picking),
    "frozen": lambda: Net(Frozen),
    "compiled": lambda: Net(compiled, 2),
    "compiled in place": lambda: Net(compiled_in_place, 2),
}


def train(model: Any) -> Any:
    """Losses, gradients and state of three steps of four micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, gradients = [], []
    for _ in range(3):
        optimizer.zero_grad()
        for shift in range(4):
            loss = F.cross_entropy(model(X + 0.1 * shift), Y)
            loss.backward()
            losses.append(loss)
        gradients.append([None if item.grad is None else item.grad.tolist() for item in model.parameters()])
        optimizer.step()
    return [loss.item() for loss in losses], gradients, [item.tolist() for item in model.state_dict().values()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for remat in map(json.loads, sys.argv[1:]):
        found = {}
        for name, make in MODELS.items():
            torch.manual_seed(0)
            torch.compiler.reset()  # it compiles the code of one class a few times only
            net = make()
            found[name] = train(net if remat is None else farspan.distribute(net, remat=remat))
        print(json.dumps(found))

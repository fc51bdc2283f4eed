"""What a module has done before it raises is done: it has drawn, counted, kept, and written its buffers. As a script:
all loops on several ranks, compared with the same loop without farspan; prints what differs, by name of the loop.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import farspan

__all__ = ["LOOPS", "found_by"]

WIDTH, STEPS = 6, 7
Model = Callable[[nn.Module], nn.Module]


class LimitError(ValueError):
    """The program's own."""


class Block(nn.Module):
    """Called as one unit; raises behind all that it does to itself."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.register_buffer("seen", torch.zeros(()))
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.limit = limit
        self.num_calls = 0
        self.sizes: list[int] = []
        self.largest: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.sizes.append(len(x))
        self.seen += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.largest = x.detach().max()
        x = F.dropout(x, 0.2, self.training)
        self.check(x)
        return x + torch.tanh(x @ self.weight)

    def check(self, x: torch.Tensor) -> None:
        if len(x) > self.limit:
            raise torch.OutOfMemoryError(f"tried to allocate {len(x)}")


class ByData(Block):
    """What raises is in the data, and says where it comes from."""

    def check(self, x: torch.Tensor) -> None:
        if x.abs().max().item() > 50:
            kind = int(x.abs().max().item()) % 3
            if kind == 0:
                raise KeyError(("x", tuple(x.shape)))
            if kind == 1:
                raise ExceptionGroup("two", [LimitError("a", 1), KeyError("b")])
            try:
                _ = [][kind]
            except IndexError as error:
                raise LimitError("too large", 50) from error


class RaisesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if gradient.abs().max() > 50:
            raise FloatingPointError("more than 50")
        return gradient


class BackwardGuard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RaisesBackward.apply(x) * self.scale  # pyright: ignore[reportOperatorIssue]


def blocks(kind: type[Block], limits: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(*[kind(limit) for limit in limits], nn.Linear(WIDTH, 3))


def state_of(model: nn.Module) -> list[Any]:
    own = [item for item in model.modules() if isinstance(item, Block)]
    found: list[Any] = [
        [item.num_calls, [*item.sizes], None if item.largest is None else item.largest.item()] for item in own
    ]
    return [*found, {name: item.tolist() for name, item in model.state_dict().items()}, torch.rand(1).item()]


def halve_the_batch(distribute: Model) -> list[Any]:
    """The shape says that it raises, from the first step on: also a run on fakes would raise."""
    model = distribute(blocks(Block, (100, 8, 100, 5)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    size, out = 12, []
    for step in range(STEPS):
        size = 12 if step == 4 else size
        inputs, targets = torch.randn(12, WIDTH), torch.randint(3, (12,))
        is_done = False
        while not is_done:
            try:
                optimizer.zero_grad()
                for x, y in zip(inputs.split(size), targets.split(size), strict=True):
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
                is_done = True
            except torch.OutOfMemoryError as error:
                out += [str(error), state_of(model)]
                size //= 2
        out.append(state_of(model))
    return out


def skip_bad_data(distribute: Model) -> list[Any]:
    """Only the data say it; the exceptions have causes, parts, and arguments that are no plain values."""
    model = distribute(blocks(ByData, (1, 2, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    out: list[Any] = []
    for step in range(STEPS):
        x = torch.randn(4, WIDTH)
        if step in (0, 3, 4, 5):
            x[1] = 80.0 + step
        try:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), torch.randint(3, (4,)))
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        except ExceptionGroup as error:
            out += [error.message, [(type(part).__name__, part.args) for part in error.exceptions]]
        except (KeyError, LimitError) as error:
            out += [type(error).__name__, repr(error.args), repr(error.__cause__), repr(error.__context__)]
        out.append(state_of(model))
    return out


def draw_before_the_backward(distribute: Model) -> list[Any]:
    """The program draws between the model's last draw and a backward that raises."""
    parts = [nn.Linear(WIDTH, 8), BackwardGuard(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 3)]
    model = distribute(nn.Sequential(*parts))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    out: list[Any] = []
    for step in range(STEPS):
        x = torch.randn(5, WIDTH)
        try:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), torch.randint(3, (5,))) * (1e6 if step in (0, 3, 4) else 1.0)
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        except FloatingPointError as error:
            out.append(str(error))
        out.append(state_of(model))
    return out


LOOPS: dict[str, Callable[[Model], list[Any]]] = {
    "halve the batch": halve_the_batch,
    "skip bad data": skip_bad_data,
    "draw before the backward": draw_before_the_backward,
}


def found_by(name: str, distribute: Model) -> list[Any]:
    """What the loop of that name leaves, and all that it has read on its way."""
    torch.manual_seed(7)
    return LOOPS[name](distribute)


def main() -> None:
    different: dict[str, str] = {}
    for name in LOOPS:
        wanted = found_by(name, lambda model: model)
        with contextlib.redirect_stderr(sys.stdout):
            got = found_by(name, farspan.distribute)
        if repr(got) != repr(wanted):
            pairs = enumerate(zip(got, wanted, strict=False))
            different[name] = next((f"{i}: {a} {b}"[:600] for i, (a, b) in pairs if repr(a) != repr(b)), "length")
    print(json.dumps(different))


if __name__ == "__main__":
    main()

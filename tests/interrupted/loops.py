"""Loops that catch what their model raises, and go on. As a script: all of them on several ranks, compared to the last
bit with the same loop without farspan; prints what differs, by name of the loop.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import farspan

__all__ = ["LOOPS", "found_by"]

STEPS, MICRO_BATCHES, BATCH, WIDTH = 4, 4, 8, 6
PAD = 1e4
"""What the model cannot take."""
Distribute = Callable[[nn.Module], nn.Module]


class TooLargeError(ValueError):
    """The program's own."""

    def __init__(self, limit: float, where: str) -> None:
        super().__init__(f"more than {limit} in {where}")
        self.limit = limit


class Guard(nn.Module):
    """Raises for what is in its data; only a run shows it."""

    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.take = nn.Linear(WIDTH, WIDTH, bias=False)  # with a weight it is called as one unit
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.take(x)
        self.norm(x)
        if x.abs().max() > 50:
            if self.error == "own":
                raise TooLargeError(50.0, "x")
            kinds = {"oom": torch.OutOfMemoryError, "memory": MemoryError, "runtime": RuntimeError}
            raise kinds[self.error]("more than 50", 50)
        return x


class RaisesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        if x.abs().max() > 50:
            raise ArithmeticError("more than 50")
        return gradient


class BackwardGuard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.take = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RaisesBackward.apply(self.take(x))  # pyright: ignore[reportReturnType]


class Net(nn.Module):
    """Blocks with running statistics and dropout, and a guard before one of them."""

    def __init__(self, at: int, guard: nn.Module | None) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.2))]
        self.blocks = nn.ModuleList(
            blocks + [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)) for _ in range(3)]
        )
        self.at = at
        self.take = nn.Linear(WIDTH, WIDTH, bias=False)
        self.guard = guard
        self.table = nn.Parameter(torch.randn(4, WIDTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number == self.at:
                taken = self.take(more)
                if self.guard is None:  # an index that is computed, and may be out of range, between modules
                    x = x + F.embedding((taken.abs() > 50).any(-1).long() * 4, self.table)
                else:
                    x = x + self.guard(taken)
            x = block(x)
        return self.head(x)


def build(at: int, guard: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(at, None if guard == "index" else BackwardGuard() if guard == "backward" else Guard(guard))


def batches(bad: dict[int, int]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each step its inputs, what else the model takes, and targets; `bad`: by step the micro-batch that raises."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for step in range(STEPS):
        x = torch.randn(MICRO_BATCHES, BATCH, WIDTH, generator=generator)
        more = torch.zeros(MICRO_BATCHES, BATCH, WIDTH)
        if step in bad:
            more[bad[step]] = PAD
        found.append((x, more, torch.randint(3, (MICRO_BATCHES, BATCH), generator=generator)))
    return found


def state_of(model: nn.Module) -> list[Any]:
    return [(name, item.tolist()) for name, item in model.state_dict().items()]


def retry(model: nn.Module, *, bad: dict[int, int], shows_gradients: bool = True) -> list[Any]:
    """A step that raises is done again in smaller micro-batches, without what the model could not take."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    out: list[Any] = []
    for x, more, y in batches(bad):
        num_parts, is_done = MICRO_BATCHES, False
        while not is_done:
            optimizer.zero_grad()
            losses = []
            try:
                for inputs, extra, targets in zip(
                    x.reshape(num_parts, -1, WIDTH),
                    more.reshape(num_parts, -1, WIDTH),
                    y.reshape(num_parts, -1),
                    strict=True,
                ):
                    loss = F.cross_entropy(model(inputs, extra), targets) / num_parts
                    loss.backward()
                    losses.append(loss)
                optimizer.step()
                is_done = True
            except Exception as error:
                out += [type(error).__name__, error.args, getattr(error, "limit", None), state_of(model)]
                if shows_gradients:
                    out += [None if item.grad is None else item.grad.tolist() for item in model.parameters()]
                num_parts, more = 2 * num_parts, more if num_parts == MICRO_BATCHES and len(bad) > 1 else 0 * more
        out += [loss.item() for loss in losses]
    return [*out, state_of(model), torch.rand(2).tolist()]


def accumulate(model: nn.Module) -> list[Any]:
    """Each loss is read at once, and gradients stay: only the micro-batch that raises is left out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    out: list[Any] = []
    for x, more, y in batches({1: 2, 3: 0}):
        for inputs, extra, targets in zip(x, more, y, strict=True):
            try:
                loss = F.cross_entropy(model(inputs, extra), targets)
                loss.backward()
                out.append(loss.item())
            except RuntimeError as error:
                out.append(str(error))
        out += [item.grad.tolist() for item in model.parameters() if item.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [*out, state_of(model)]


def evaluate(model: nn.Module) -> list[Any]:
    """An exception while a model in training mode is evaluated without gradient, and in evaluation mode."""
    out: list[Any] = []
    for training in (True, False, True):
        model.train(training)
        for x, more, _ in batches({0: 3, 2: 1}):
            with torch.no_grad():
                try:
                    outputs = [model(inputs, extra) for inputs, extra in zip(x, more, strict=True)]
                    out.append([output.sum().item() for output in outputs])
                except RuntimeError as error:
                    out += [str(error), state_of(model)]
    return out


def with_closure(model: nn.Module) -> list[Any]:
    """The exception comes in a closure of the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    out: list[Any] = []
    for x, more, y in batches({1: 3}):
        for extra in (more, 0 * more):

            def closure(x: Any = x, extra: Any = extra, y: Any = y) -> Any:
                optimizer.zero_grad()
                losses = [F.cross_entropy(model(*part), to) for *part, to in zip(x, extra, y, strict=True)]
                for loss in losses:
                    loss.backward()
                return losses[-1]

            try:
                out.append(optimizer.step(closure).item())  # pyright: ignore[reportOptionalMemberAccess]
            except RuntimeError as error:
                out.append(str(error))
    return [*out, state_of(model)]


LOOPS: dict[str, tuple[int, str, Callable[[nn.Module], list[Any]]]] = {
    "forward, first block": (0, "runtime", lambda model: retry(model, bad={1: 2})),
    "forward, last block": (3, "oom", lambda model: retry(model, bad={2: 3})),
    "forward, twice in a row": (2, "memory", lambda model: retry(model, bad={1: 0, 3: 3})),
    "a class of the program's own": (1, "own", lambda model: retry(model, bad={2: 1})),
    "an index between modules": (2, "index", lambda model: retry(model, bad={2: 2})),
    "backward": (0, "backward", lambda model: retry(model, bad={1: 1, 2: 3}, shows_gradients=False)),
    "accumulation": (2, "runtime", accumulate),
    "evaluation": (3, "runtime", evaluate),
    "closure": (1, "runtime", with_closure),
}
"""By name: where the guard is, what it raises, the loop."""


def found_by(name: str, distribute: Distribute) -> list[Any]:
    """What the loop of that name leaves, and all that it has read on its way."""
    at, guard, loop = LOOPS[name]
    torch.manual_seed(7)
    return loop(distribute(build(at, guard)))


def main() -> None:
    wanted = {name: found_by(name, lambda model: model) for name in LOOPS}
    schedules = [None, "gpipe", "1f1b", "zero-bubble"]
    different: dict[str, str] = {}
    for number, name in enumerate(LOOPS):
        schedule = schedules[number % len(schedules)]
        remat = ["blocks.*"] if number % 3 == 1 else None
        distribute = functools.partial(farspan.distribute, schedule=schedule, remat=remat)
        with contextlib.redirect_stderr(sys.stdout):
            got = found_by(name, distribute)
        if repr(got) != repr(wanted[name]):
            pairs = enumerate(zip(got, wanted[name], strict=False))
            different[name] = next((f"{i}: {a} {b}"[:500] for i, (a, b) in pairs if repr(a) != repr(b)), "length")
    print(json.dumps(different))


if __name__ == "__main__":
    main()

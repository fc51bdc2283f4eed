"""Programs whose optimizer's state is copied for a checkpoint, and a hold on who copies it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.optimizer import Optimizer

import farspan
from farspan.execute.optimizers import lent_state
from farspan.state.saving import writer

SIZE = 256  # a square of floats is larger than what is copied at once


class Own(Optimizer):
    """An optimizer of the program's own: momentum, in what it keeps, and where `beside`, in a list of its own too."""

    def __init__(self, parameters: Any, *, beside: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.beside: list[torch.Tensor] | None = [] if beside else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                    if self.beside is not None:
                        self.beside.append(self.state[p]["momentum"])
                self.state[p]["momentum"].mul_(0.9).add_(p.grad)
                p.add_(self.state[p]["momentum"], alpha=-group["lr"])


class Program:
    """A model and its optimizer, some steps on."""

    def __init__(self, make: Callable[[Any], Optimizer], *, is_distributed: bool) -> None:
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
        plan = {"0": "rank:0", "1": "rank:0", "2": "rank:1"} if is_distributed else None
        self.model = farspan.distribute(layers, plan=plan) if plan else layers
        self.optimizer = make(self.model.parameters())
        self.inputs = torch.randn(4, SIZE)
        for _ in range(2):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.forward_and_backward()
        self.optimizer.step()

    def forward_and_backward(self) -> None:
        self.model(self.inputs).square().mean().backward()


class Hold:
    """Holds the copiers until as many ranks wait for them, or `release`."""

    def __init__(self, patched: pytest.MonkeyPatch, num_ranks: int) -> None:
        self.num_waits = self.num_lent = 0
        self._released = threading.Event()
        copy_bytes, held = writer.copy_bytes, self

        def hold(pairs: Any) -> None:
            held.num_lent += len(pairs)
            assert not pairs or held._released.wait(20)
            copy_bytes(pairs)

        class Copied(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                held.num_waits += not self.is_set()
                if held.num_waits >= num_ranks:
                    held.release()
                return super().wait(timeout)

        patched.setattr(writer, "copy_bytes", hold)
        patched.setattr(lent_state, "Event", Copied)

    def release(self) -> None:
        self._released.set()


@contextmanager
def holding(num_ranks: int = 1) -> Iterator[Hold]:
    with pytest.MonkeyPatch.context() as patched:
        hold = Hold(patched, num_ranks)
        try:
            yield hold
        finally:
            hold.release()


def saved_in(path: str) -> dict[str, torch.Tensor]:
    return {name: item for file in Path(path).glob("*.safetensors") for name, item in load_file(file).items()}


def check_same(one: str, other: str) -> None:
    expected, found = saved_in(one), saved_in(other)
    assert expected.keys() == found.keys() and len(expected) > 4
    assert [name for name, item in expected.items() if not torch.equal(item, found[name])] == []


def save_twice(program: Program, folder: Path, write: Callable[[], object], hold: Hold) -> None:
    """Both checkpoints are the same, whatever is written while the second one is copied."""
    objects = {"model": program.model, "optimizer": program.optimizer}
    first = farspan.save(folder, **objects, step=1, wait=True).wait()
    second = farspan.save(folder, **objects, step=2)
    write()
    hold.release()
    check_same(first, second.wait())


def first_of(program: Program) -> tuple[Any, str]:
    """A parameter, and the name of what is kept for it."""
    parameter = next(program.model.parameters())
    kept = vars(program.optimizer)["state"][parameter]
    return parameter, next(name for name, item in kept.items() if isinstance(item, torch.Tensor) and item.dim())


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda items: torch.optim.AdamW(items, lr=0.1),
    "AdamW, fused": lambda items: torch.optim.AdamW(items, lr=0.1, fused=True),
    "SGD": lambda items: torch.optim.SGD(items, lr=0.1, momentum=0.9, foreach=False),
    "Own": Own,
}

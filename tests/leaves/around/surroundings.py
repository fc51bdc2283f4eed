"""One rank, or the plain program: what modules read beside themselves changes between their calls.

It prints a line for each way in which that can be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.leaves.around import surrounding_settings as settings
from torch import Tensor, nn

import farspan

IS_PLAIN, COMPUTES_AGAIN = "plainly" in sys.argv, "again" in sys.argv
NUM_STEPS = 2 if "shorter" in sys.argv else 3
RATE, RATE_BACK = 0.0, 0.0
OPTIONS: dict[str, Any] = {"deep": {"rate": 0.0}, "rates": [0.0, 0.0]}
ARGUMENTS = SimpleNamespace(rate=0.0, step=0)
HISTORY = np.zeros(4096)
WEIGHTS, FACTORS = nn.Parameter(torch.ones(8), requires_grad=False), np.ones(8, dtype=np.float32)
holder = [0.0]


@dataclass
class Config:
    """With a method, and a value that nobody reads."""

    base: float = 0.0
    seen: list[int] = field(default_factory=list[int])

    def rate(self) -> float:
        return self.base


CONFIG = Config()


class Settings:
    """A name for variables, of which no object is made."""

    rate = 0.0


DEFAULT, NAMES = {"rate": 0.0}, {"0.0": True}
OUTSIDE = nn.Dropout(0.1)
OUTSIDE.rate = 0.0  # type: ignore[assignment]


def from_default(options: dict[str, float] = DEFAULT) -> float:
    return options["rate"]


def held() -> float:
    return Settings.rate + from_default() + float(next(iter(NAMES))) + OUTSIDE.rate  # type: ignore[operator]


class WithRate(nn.Module):
    class_rate = 0.0


class Block(WithRate):
    """The rate decides what is computed, drawn, and trained."""

    def __init__(self, outer: Callable[[], float]) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.outer = outer
        self.functions = [{"held": held}]
        self.weights, self.factors = {"of": [torch.ones(8)]}, np.ones(8, dtype=np.float32)

    @property
    def rate(self) -> float:
        own = RATE + OPTIONS["deep"]["rate"] + OPTIONS["rates"][1] + ARGUMENTS.rate + CONFIG.rate()
        own += self.functions[0]["held"]()
        return own + self.class_rate + self.outer() + settings.rate() + settings.RATE

    def forward(self, x: Tensor) -> Tensor:
        rate = self.rate
        if rate > 0.2 and len(HISTORY):
            return F.dropout(self.other(x), rate)
        factors = torch.from_numpy(FACTORS * self.factors) * WEIGHTS * self.weights["of"][0]
        return settings.scaled(self.one(x) * factors) * (1 + rate)


class Scale(torch.autograd.Function):
    """Reads a global in its forward, and one in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rate = 1 + RATE
        return x * ctx.rate

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.rate * (1 + RATE_BACK)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(lambda: holder[0]), Block(lambda: 0.0)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Scale.apply(self.second(self.first(x))))


def rebind(rate: float) -> None:
    global RATE
    RATE = rate


def in_another_file(rate: float) -> None:
    settings.RATE = rate


def in_a_base_class(rate: float) -> None:
    WithRate.class_rate = rate


def as_a_key(rate: float) -> None:
    NAMES.clear()
    NAMES[str(rate)] = True


def by_another_forward(rate: float) -> None:
    def forward(self: Block, x: Tensor) -> Tensor:
        return F.dropout(self.other(x), rate) if rate > 0.2 else self.one(x) * (1 + rate)

    Block.forward = forward  # type: ignore[method-assign]


def beside_it(rate: float) -> None:
    """And what modules do not read changes, or what is too large to be looked at."""
    ARGUMENTS.step += 1
    HISTORY[ARGUMENTS.step] = rate
    ARGUMENTS.rate = rate


def for_a_while(rate: float) -> None:
    """Nothing is left of it when the step is run."""
    rebind(rate)


def between_forward_and_backward(rate: float) -> None:
    global RATE_BACK
    RATE_BACK = rate


def in_memory(weights: Tensor, rate: float) -> None:
    weights[2:].data.fill_(1 + rate)


def in_an_array(factors: Any, rate: float) -> None:
    factors[3] = 1 + rate


WAYS: dict[str, Callable[[float], object]] = {
    "a global": rebind,
    "a global of another file": in_another_file,
    "a table of another file": lambda rate: settings.table.update(rate=rate),
    "a dictionary": lambda rate: OPTIONS["deep"].update(rate=rate),
    "another dictionary": lambda rate: OPTIONS.update(deep={"rate": rate}),
    "a list": lambda rate: OPTIONS["rates"].__setitem__(1, rate),
    "an object's attribute": beside_it,
    "what a method reads": lambda rate: setattr(CONFIG, "base", rate),
    "a closure": lambda rate: holder.__setitem__(0, rate),
    "a base class": in_a_base_class,
    "a class that is a name": lambda rate: setattr(Settings, "rate", rate),
    "a default": lambda rate: DEFAULT.update(rate=rate),
    "a key": as_a_key,
    "a module outside of the model": lambda rate: setattr(OUTSIDE, "rate", rate),
    "a method": by_another_forward,
    "for a while": for_a_while,
    "between forward and backward": between_forward_and_backward,
    "a function for each": lambda rate: setattr(model.second, "outer", lambda: rate),
    "a tensor": lambda rate: in_memory(WEIGHTS, rate),
    "an array": lambda rate: in_an_array(FACTORS, rate),
    "a tensor of a module": lambda rate: in_memory(model.second.weights["of"][0], rate),
    "an array of a module": lambda rate: in_an_array(model.second.factors, rate),
}
model: Any = None
RATES = [0.0, 0.1, 0.1, 0.5, 0.0, 0.5, 0.1, 0.0, 0.5]


def train(way: str) -> None:
    global model
    torch.manual_seed(1)
    model = Net()
    if not IS_PLAIN:
        farspan.distribute(model, plan={"first": "rank:0", "second": "rank:1", "head": "rank:0"}, remat=COMPUTES_AGAIN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[str] = []
    x = torch.randn(5, 8)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses = []
        for rate in RATES[3 * step : 3 * step + 3]:
            if way != "between forward and backward":
                WAYS[way](rate)
            loss = model(x).square().mean()
            if way == "between forward and backward":
                WAYS[way](rate)
            if way == "for a while":
                rebind(0.0)
            loss.backward()
            losses.append(loss)
        found += [str(parameter.grad is None) for parameter in model.parameters()]
        optimizer.step()
        found += [float(loss).hex() for loss in losses]
    found += [float(parameter.detach().sum()).hex() for parameter in model.parameters()]
    found.append(float(torch.rand(())).hex())
    own = [
        RATE,
        OPTIONS,
        ARGUMENTS,
        HISTORY.sum(),
        holder,
        CONFIG,
        Settings.rate,
        DEFAULT,
        NAMES,
        FACTORS,
        settings.table,
    ]
    found += map(str, own)
    WAYS[way](0.0)
    if farspan.rank() == 0 or IS_PLAIN:
        print(way, *found, flush=True)


if __name__ == "__main__":
    forward = Block.forward
    for way in WAYS:
        train(way)
        Block.forward = forward  # type: ignore[method-assign]

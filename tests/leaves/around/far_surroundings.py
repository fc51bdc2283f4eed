"""One rank, or the plain program: what modules read is behind objects of Python's and torch's own, or hard to name.

It prints a line for each way in which that can be.
"""

from __future__ import annotations

import configparser
import dataclasses
import functools
import itertools
import operator
import random
import sys
import threading
from collections import ChainMap, UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farspan

IS_PLAIN, COMPUTES_AGAIN = "plainly" in sys.argv, "again" in sys.argv


class Table(UserDict[str, float]):
    """A dictionary of the program's own."""


@dataclasses.dataclass
class Config:
    """Read by its fields."""

    rate: float = 0.0
    scale: float = 1.0

    def by_fields(self) -> float:
        return sum(getattr(self, each.name) for each in dataclasses.fields(self)) - 1.0


class ByKind:
    """Methods that are chosen by what they are given."""

    @functools.singledispatchmethod
    def rate(self, number: object) -> float:
        raise NotImplementedError

    @rate.register
    def _(self, number: int) -> float:
        return BASE * number

    def times(self, number: float) -> float:
        return BASE * number

    once = functools.partialmethod(times, 1.0)


def scaled(number: float, *, rate: float) -> float:
    return number * rate


@functools.lru_cache
def remembered(number: float) -> Callable[[], float]:
    return lambda: BASE * number


BASE, CONFIG, TABLE, CHAIN, BY_KIND = 0.0, Config(), Table(rate=0.0), ChainMap({"rate": 0.0}, {}), ByKind()
GET, EVENT, PARTIAL, PARSER = (
    operator.attrgetter("rate"),
    threading.Event(),
    functools.partial(scaled, rate=0.0),
    configparser.ConfigParser(),
)
PARSER["a"] = {"rate": "0.0"}
PRIOR = torch.distributions.Normal(torch.zeros(()), torch.ones(()))
OPTIMIZER = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
SCHEDULER = torch.optim.lr_scheduler.LambdaLR(OPTIMIZER, lambda step: 1.0 + step % 3)
RANDOM, GENERATOR, COUNT = random.Random(3), np.random.default_rng(3), itertools.count()
STREAM = (number / 10 for number in itertools.count())
DRAW = functools.partial(random.Random.uniform, random.Random(4), 0.0)


def imported_late() -> float:
    from tests.leaves.around import surrounding_late

    return surrounding_late.RATE


def class_imported_late() -> float:
    from tests.leaves.around.surrounding_late import Settings

    return Settings.rate


def set_late(rate: float) -> None:
    from tests.leaves.around import surrounding_late

    surrounding_late.RATE = surrounding_late.Settings.rate = rate


def set_base(rate: float) -> None:
    global BASE
    BASE = rate


def matched() -> float:
    match CONFIG:
        case Config(rate=rate):
            return rate
    raise AssertionError


def matched_by_position() -> float:
    match CONFIG:
        case Config(first):
            return first
    raise AssertionError


def nothing(rate: float) -> None:
    """Modules alone move on what they draw from."""


def of_prior(rate: float) -> None:
    global PRIOR
    PRIOR = torch.distributions.Normal(PRIOR.loc, 1 + rate)


def of_weight(rate: float) -> None:
    model.second.linear.weight.rate = rate


def next_rate(rate: float) -> None:
    OPTIMIZER.step()
    SCHEDULER.step()


def of_optimizer(rate: float) -> None:
    OPTIMIZER.param_groups[0]["lr"] = rate


def by_names() -> float:
    return sum(getattr(CONFIG, name) for name in ("rate", "scale")) - 1.0


Way = tuple[Callable[[], Any], Callable[[float], object]]
"""What modules call, and what the program does before each micro-batch."""
WAYS: dict[str, Way] = {
    "a file imported late": (imported_late, set_late),
    "a class imported late": (class_imported_late, set_late),
    "names in a tuple": (by_names, lambda rate: setattr(CONFIG, "rate", rate)),
    "a match by name": (matched, lambda rate: setattr(CONFIG, "rate", rate)),
    "a match by position": (matched_by_position, lambda rate: setattr(CONFIG, "rate", rate)),
    "fields": (CONFIG.by_fields, lambda rate: setattr(CONFIG, "rate", rate)),
    "a copy of it": (lambda: GET(dataclasses.replace(CONFIG)), lambda rate: setattr(CONFIG, "rate", rate)),
    "a getter": (lambda: GET(CONFIG), lambda rate: setattr(CONFIG, "rate", rate)),
    "an event": (lambda: 0.1 + EVENT.is_set(), lambda rate: EVENT.set() if rate else EVENT.clear()),
    "a chain of maps": (lambda: CHAIN["rate"], lambda rate: CHAIN.update(rate=rate)),
    "a dictionary of one's own": (lambda: TABLE["rate"], lambda rate: TABLE.update(rate=rate)),
    "a parser": (lambda: float(PARSER.get("a", "rate")), lambda rate: PARSER.set("a", "rate", str(rate))),
    "a partial function": (lambda: PARTIAL(2.0), lambda rate: PARTIAL.keywords.update(rate=rate)),
    "a method by kind": (lambda: BY_KIND.rate(2), set_base),
    "a partial method": (lambda: BY_KIND.once(), set_base),
    "behind a cache": (lambda: remembered(2.0)(), set_base),
    "a distribution's tensor": (lambda: PRIOR.mean * 2, lambda rate: PRIOR.loc.fill_(rate)),
    "a distribution": (lambda: PRIOR.stddev, of_prior),
    "an optimizer": (lambda: OPTIMIZER.param_groups[0]["lr"], of_optimizer),
    "a scheduler": (lambda: SCHEDULER.get_last_lr()[0], next_rate),
    "random": (lambda: RANDOM.random(), nothing),
    "a generator of numpy": (lambda: GENERATOR.random(), lambda rate: rate and GENERATOR.random()),
    "a count": (lambda: next(COUNT) / 10, nothing),
    "a generator": (lambda: next(STREAM), nothing),
    "a partial function that draws": (lambda: DRAW(1.0), nothing),
    "an attribute of a parameter": (lambda: 0.1, of_weight),
    "an attribute of a tensor": (lambda: 0.1, nothing),
}
model: Any = None
RATES = [0.1, 0.7, 1.5, 0.0, 0.7, 0.1]


class Block(nn.Module):
    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(8, 8), read

    def forward(self, x: Tensor) -> Tensor:
        rate = self.read() + getattr(self.linear.weight, "rate", 0.0) + getattr(x, "rate", 0.0)
        return x + rate * F.gelu(self.linear(x))


class Net(nn.Module):
    def __init__(self, read: Callable[[], Any], *, marks: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(read), Block(read), nn.Linear(8, 3)
        self.marks = marks

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.marks:
            x.rate = 0.5  # type: ignore[attr-defined]
        return self.head(self.second(x))


def train(way: str) -> None:
    global model
    torch.manual_seed(1)
    read, prepare = WAYS[way]
    model = Net(read, marks=way == "an attribute of a tensor")
    if not IS_PLAIN:
        farspan.distribute(model, plan={"first": "rank:0", "second": "rank:1", "head": "rank:0"}, remat=COMPUTES_AGAIN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[str] = []
    x = torch.randn(5, 8)
    for step in range(2):
        optimizer.zero_grad()
        losses = []
        for rate in RATES[3 * step : 3 * step + 3]:
            prepare(rate)
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss)
        optimizer.step()
        found += [float(loss).hex() for loss in losses]
    found += [float(parameter.detach().sum()).hex() for parameter in model.parameters()]
    found += map(str, [BASE, CONFIG, TABLE, CHAIN, EVENT.is_set(), PARTIAL.keywords, PRIOR.loc, PRIOR.scale])
    found += map(str, [PARSER["a"]["rate"], OPTIMIZER.param_groups[0]["lr"], SCHEDULER.last_epoch])
    found += map(str, [RANDOM.random(), GENERATOR.random(), COUNT, next(STREAM), DRAW(1.0)])
    if farspan.rank() == 0 or IS_PLAIN:
        print(way, *found, flush=True)


if __name__ == "__main__":
    for name in WAYS:
        train(name)

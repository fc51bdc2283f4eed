"""One process has a counter, four call it: what each kind of call does in a second."""

from __future__ import annotations

import collections
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

import farspan

MOST_UNDER_WAY = 200


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    def size(self, tensor: torch.Tensor) -> int:
        return tensor.numel()


class Barrier:
    """Lets four callers begin together, and end together."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties)

    def wait(self) -> None:
        self._barrier.wait(100)


class Result(Protocol):
    def result(self) -> Any: ...


def pipelined(call: Callable[[], Result], number: int) -> float:
    """Calls a second with up to 200 under way."""
    under_way: collections.deque[Result] = collections.deque()
    began = time.perf_counter()
    for _ in range(number):
        under_way.append(call())
        if len(under_way) == MOST_UNDER_WAY:
            under_way.popleft().result()
    for future in under_way:
        future.result()
    return number / (time.perf_counter() - began)


def waiting(call: Callable[[], Any], number: int) -> float:
    """Calls a second of a caller that waits for each result."""
    began = time.perf_counter()
    for _ in range(number):
        call()
    return number / (time.perf_counter() - began)


def main() -> None:
    out, scale = Path(sys.argv[1]), float(sys.argv[2])
    if farspan.role() == "server":
        farspan.expose("barrier", Barrier(4), threads=4)
        farspan.expose("counter", Counter()).wait()
    counter, barrier = farspan.service("counter"), farspan.service("barrier")
    rates: dict[str, float] = {}
    waiting(lambda: counter.add(0), 100)
    barrier.wait()
    if farspan.rank() == 0:
        alone(counter, scale, rates)
    barrier.wait()
    number = int(4000 * scale)
    began = time.perf_counter()
    waiting(lambda: counter.add(1), number)
    barrier.wait()
    rates["four callers, each waits"] = 4 * number / (time.perf_counter() - began)
    if farspan.rank() == 0:
        out.write_text(json.dumps(rates))


def alone(counter: Any, scale: float, rates: dict[str, float]) -> None:
    """The rates of one caller, while the others wait."""
    small, large = torch.zeros(1 << 10), torch.zeros(1 << 18)
    rates["one caller, futures"] = pipelined(lambda: counter.future.add(1), int(40_000 * scale))
    rates["one caller, each waits"] = waiting(lambda: counter.add(1), int(10_000 * scale))
    rates["futures of 4 KiB"] = pipelined(lambda: counter.future.size(small), int(8_000 * scale))
    rates["futures of 1 MiB"] = pipelined(lambda: counter.future.size(large), int(1_000 * scale))


if __name__ == "__main__":
    main()

"""Two Linears on two ranks: which functions of farspan a warm micro-batch passes on rank 0; its last line is JSON.

    forward    model(x)
    backward   loss.backward()
    step       optimizer.step()
    share      what the step of two micro-batches calls more often than the step of one

Of each phase "file function", in the order in which they are first met.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import farspan

_ROOT = f"{Path(farspan.__file__).parent}/"
_NUM_WARM, _NUM_PAIRS = 2, 3

Passed = dict[str, int]
"""Calls by "file function"."""


def passed_by(function: Callable[[], Any], passed: Passed) -> Any:
    """Call `function`; count what it calls of farspan, in this thread."""

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_ROOT):
            name = f"{code.co_filename.removeprefix(_ROOT)} {code.co_qualname}"
            passed[name] = passed.get(name, 0) + 1

    sys.setprofile(note)
    try:
        return function()
    finally:
        sys.setprofile(None)


def traced_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, num: int) -> dict[str, Passed]:
    """A step of `num` micro-batches; forward and backward are those of the last one."""
    optimizer.zero_grad()
    phases: dict[str, Passed] = {}
    for _ in range(num):
        phases = {"forward": {}, "backward": {}, "step": {}}
        output = passed_by(lambda: model(x), phases["forward"])
        passed_by(output.square().mean().backward, phases["backward"])
    passed_by(optimizer.step, phases["step"])
    return phases


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    farspan.distribute(model, plan={"0": "rank:0", "1": "rank:1"})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(2, 4)
    for _ in range(_NUM_WARM):
        traced_step(model, optimizer, x, 2)
        traced_step(model, optimizer, x, 1)
    pairs = [(traced_step(model, optimizer, x, 2), traced_step(model, optimizer, x, 1)) for _ in range(_NUM_PAIRS)]
    phases = {phase: _in_all([list(one[phase]) for _, one in pairs]) for phase in pairs[-1][1]}
    share = _in_all([_more(two["step"], one["step"]) for two, one in pairs])
    if farspan.rank() == 0:
        print(json.dumps({**phases, "share": share}))


def _in_all(runs: list[list[str]]) -> list[str]:
    """What is in each of several runs, in the order of the last: what is only waited for differs each time."""
    return [name for name in runs[-1] if all(name in run for run in runs)]


def _more(passed: Passed, than: Passed) -> list[str]:
    return [name for name, count in passed.items() if count > than.get(name, 0)]


if __name__ == "__main__":
    main()

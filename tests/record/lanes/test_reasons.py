"""Why batches are not cut is said with the module and the line that the user knows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.places import engine
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan


class Part(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def reading(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def of_rows(x: Tensor) -> Tensor:
    return x * x.argsort(0)


HERE = re.escape(__file__)


def built(part: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), part, nn.Linear(6, 6))


def hooked() -> nn.Module:
    model = built(Part(torch.tanh))
    model[1].register_forward_hook(lambda *_: None)  # type: ignore[index]
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: built(Part(centred)),
            rf"the rows of a batch mix, or may mix, in mean .*, in 1 \(Part\) at {HERE}:\d+, in centred: return x - .*",
        ),
        (
            lambda: built(Part(of_rows)),
            rf"the rows of a batch mix, .*, in 1 \(Part\) at {HERE}:\d+, in of_rows: return x \* x.argsort\(0\)",
        ),
        (
            lambda: built(Part(reading)),
            rf"it reads data while it runs .*, in 1 \(Part\) at {HERE}:\d+, in reading: return x if .*",
        ),
        (lambda: built(nn.BatchNorm1d(6)), r"it writes into its buffers, .*, in 1 \(BatchNorm1d\)"),
        (hooked, r"hooks on its modules would see the parts of a batch: on 1 \(Part\)"),
    ],
)
def test_why_a_batch_is_not_cut_is_said_with_module_and_line(make: Callable[[], nn.Module], why: str) -> None:
    def program(_: int) -> list[str]:
        model = farspan.distribute(make(), micro_batches=4)
        model(torch.randn(8, 6)).square().mean().backward()
        return [*engine().recorder.batches.models[id(model)].reasons]

    for said in run_threads(2, program):
        assert len(said) == 1 and re.fullmatch(why, said[0]), said


def test_parts_that_are_called_by_themselves_are_named() -> None:
    def program(_: int) -> list[str]:
        model: Any = farspan.distribute(built(Part(torch.tanh)), micro_batches=4)
        x = model[0](torch.randn(8, 6))
        model[2](model[1](x)).square().mean().backward()
        return [*engine().recorder.batches.models[id(model)].reasons]

    for said in run_threads(2, program):
        (line,) = said
        assert re.fullmatch(
            rf"parts of the model are called by themselves: 0 \(Linear\) at {HERE}:\d+, in program", line
        )

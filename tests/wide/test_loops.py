"""Wide stages: bit for bit one process, or within rounding, whatever the loop does and however wide they are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.support.plainly import assert_same_as_plainly, train
from tests.wide import loops
from tests.wide.loops import LOOPS
from torch import Tensor, nn

WIDTHS: dict[str, tuple[int, dict[str, str]]] = {
    "2": (2, {"": "rank:0+rank:1"}),
    "2-1": (3, {"blocks": "rank:0+rank:1", "head": "rank:2"}),
    "1-2": (3, {"blocks.0": "rank:0", "blocks.*": "rank:2+rank:1", "head": "rank:2+rank:1"}),
    "3": (3, {"": "rank:0+rank:1+rank:2"}),
    "2-1 over 2": (2, {"blocks": "rank:0+rank:1", "head": "rank:1"}),
    "2-2": (4, {"blocks.0": "rank:0+rank:1", "blocks.*": "rank:2+rank:3", "head": "rank:2+rank:3"}),
}


def run(loop: str, width: str, gradient_reduction: str) -> tuple[Any, list[Any]]:
    num_ranks, plan = WIDTHS[width]
    return loops.run(loop, num_ranks, plan=plan, gradient_reduction=gradient_reduction)


@pytest.mark.parametrize(("loop", "width"), list(itertools.product(list(LOOPS), ["2", "2-1"])))
def test_exact_is_one_process_to_the_last_bit(loop: str, width: str) -> None:
    wanted, found = run(loop, width, "exact")
    assert all(same(item, wanted) for item in found)


@pytest.mark.parametrize("width", [width for width in WIDTHS if width not in ("2", "2-1")])
def test_of_any_width(width: str) -> None:
    wanted, found = run("clipped_adamw", width, "exact")
    assert all(same(item, wanted) for item in found)
    wanted, found = run("carried_on", width, "exact")
    assert all(same(item, wanted) for item in found)


@pytest.mark.parametrize("loop", ["uneven_numbers", "two_optimizers", "carried_on", "gradients_asked_for", "closures"])
def test_sums_are_one_process_within_rounding(loop: str) -> None:
    wanted, found = run(loop, "2-1", "sum")
    assert all(same(item, found[0]) for item in found), "all ranks see the same"
    assert largest_difference(found[0], wanted) < 1e-5


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_are_the_same_in_every_run(width: str) -> None:
    wanted, found = run("uneven_numbers", width, "sum")
    assert same(run("uneven_numbers", width, "sum")[1], found), "to the last bit"
    assert largest_difference(found[0], wanted) < 1e-6


class Warmup(nn.Module):
    """Counts in a buffer, by which it decides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.first(x) if self.calls < 4 else self.second(x))


def test_a_module_that_decides_by_a_count_in_a_buffer_is_that_of_one_process() -> None:
    plan = {"0": "rank:0+rank:1", "1": "rank:1"}
    assert_same_as_plainly(lambda: nn.Sequential(Warmup(), nn.Linear(8, 5)), train, 2, plan=plan)


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return torch.equal(torch.as_tensor(found), wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted)


def largest_difference(found: Any, wanted: Any) -> float:
    """Of any two numbers, relative to those above 1."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        return max(largest_difference(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, torch.Tensor):
        return float((torch.as_tensor(found) - wanted).abs().max())
    if isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        return max(map(largest_difference, found, wanted), default=0.0)
    if isinstance(wanted, float):
        return abs(found - wanted) / max(1.0, abs(wanted))
    assert found == wanted
    return 0.0

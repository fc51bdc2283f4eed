"""Remat where the ranks of a stage run each layer together: the same numbers, to the last bit, for less memory."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from tests.remat.test_remat_memory import peaks
from tests.split import test_forwards
from tests.support.models import GPT
from tests.support.ranks import run_threads
from tests.wide.loops import run
from tests.wide.test_loops import largest_difference, same
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import farspan
from farspan.call.remat.unit import Unit


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been computed again."""
    found: list[str] = []
    run_again = Unit.run_again

    def counted(unit: Unit) -> None:
        found.append(unit.name)
        run_again(unit)

    monkeypatch.setattr(Unit, "run_again", counted)
    return found


@functools.cache
def without(loop: str, num_ranks: int, micro_batches: int | None = None) -> Any:
    return run(loop, num_ranks, tensor_parallel=2, micro_batches=micro_batches)


@pytest.mark.parametrize("remat", [True, ["blocks.?.a", "blocks.1", "head"], ["*"], ["blocks"]])
def test_the_same_bits_as_without(remat: Any, times: list[str]) -> None:
    """With dropout and clipping."""
    _, found = run("clipped_adamw", 2, tensor_parallel=2, remat=remat)
    assert times
    wanted, kept = without("clipped_adamw", 2)
    assert same(found, kept), "to the last bit"
    assert largest_difference(found[0], wanted) < 1e-5


@pytest.mark.parametrize(
    "loop",
    [
        "evaluated",
        "gradients_held",
        "carried_on",
        "closures",
        "written_by_hand",
    ],
)
def test_the_same_bits_in_other_loops(loop: str) -> None:
    assert same(run(loop, 2, tensor_parallel=2, remat=True)[1], without(loop, 2)[1])


@pytest.mark.parametrize(("num_ranks", "micro_batches"), [(4, None), (2, 2)])
def test_two_stages_and_lanes(num_ranks: int, micro_batches: int | None, times: list[str]) -> None:
    _, found = run("written_by_hand", num_ranks, tensor_parallel=2, remat=True, micro_batches=micro_batches)
    assert times
    assert same(found, without("written_by_hand", num_ranks, micro_batches)[1])


def test_the_same_in_every_run() -> None:
    first, second = (run("uneven_numbers", 4, tensor_parallel=2, remat=True)[1] for _ in range(2))
    assert same(first, second), "to the last bit"


def trained(forward: Any, **options: Any) -> list[Any]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = test_forwards.Net(forward)
        nets = [copy.deepcopy(net) for _ in range(2)]
        return run_threads(
            2, lambda rank: test_forwards.train(farspan.distribute(nets[rank], tensor_parallel=2, **options))
        )


FORWARDS = ["own_function", "written_at_random", "dropped", "statistics", "shares_memory"]
OTHERS = "attention attention_by_hand checkpointed in_place written like_a_part needed_whole fused"


@pytest.mark.parametrize("name", [*FORWARDS, *OTHERS.split()])
def test_whatever_a_module_does(name: str, times: list[str]) -> None:
    """Written in place, statistics (once), draws, views, functions of the program's own."""
    forward = getattr(test_forwards, name)
    assert trained(forward, remat=True) == trained(forward)
    assert times


class Checkpointed(GPT):
    """The program's own checkpoints, of both kinds, around its blocks."""

    def __init__(self) -> None:
        super().__init__(blocks=3)
        for number, block in enumerate(self.blocks):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=number == 1)


def test_the_peak_falls_on_every_rank(times: list[str]) -> None:
    kept = peaks(2, False, tensor_parallel=2, make=lambda: GPT(blocks=3))
    assert not times
    again = peaks(2, True, tensor_parallel=2, make=lambda: GPT(blocks=3))
    assert all(new < 0.7 * old for new, old in zip(again, kept, strict=True)), (kept, again)


def test_the_peak_falls_with_the_programs_own_checkpoints() -> None:
    kept = peaks(2, False, tensor_parallel=2, make=lambda: GPT(blocks=3))
    own = peaks(2, False, tensor_parallel=2, make=Checkpointed)
    assert all(new < 0.7 * old for new, old in zip(own, kept, strict=True)), (kept, own)


def factor(net: Any, x: Tensor) -> Tensor:
    y = torch.tanh(net.out(torch.tanh(net.q(x))))
    return torch.linalg.cholesky(-y.square().flatten(0, 1)[:8]) + y.sum()


def test_an_operation_raises_as_without() -> None:
    """When it runs: it was recorded long before."""
    for options in ({}, {"remat": True}):
        with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
            trained(factor, **options)

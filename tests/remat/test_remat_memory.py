"""What is computed again is not there meanwhile: the bytes alive in a step, counted as they come and go."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.models import GPT, Block
from tests.support.ranks import run_threads
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import farspan
from farspan.execute.process.world import current_engine

IDS = torch.randint(17, (4, 32), generator=torch.Generator().manual_seed(3))


class Alive(TorchDispatchMode):
    """Counts the memory that operations of this thread make, and that is not yet freed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.peak_bytes = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result):
            if type(item) is torch.Tensor:
                storage = item.untyped_storage()
                if storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    self.num_bytes += storage.nbytes()
                    weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return result

    def free(self, key: int, num_bytes: int) -> None:
        self.known.discard(key)
        self.num_bytes -= num_bytes


def peaks(
    num_ranks: int,
    remat: Any,
    *,
    is_one_backward: bool = False,
    is_split: bool = False,
    make: Any = GPT,
    **options: Any,
) -> list[int]:
    """The most bytes that were alive at once in steps of six micro-batches, by rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = [make() for _ in range(num_ranks)]

    def program(rank: int) -> int:
        model: nn.Module = farspan.distribute(models[rank], remat=remat, **options)
        engine = current_engine()
        assert engine is not None
        if is_split:
            engine.schedule, engine.least_weight_work_s = "zero-bubble", -math.inf
        else:
            engine.least_weight_work_s = math.inf
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> int:
            optimizer.zero_grad()
            losses = []
            for _ in range(6):
                losses.append(F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()))
                if not is_one_backward:
                    losses[-1].backward()
            if is_one_backward:
                torch.stack(losses).sum().backward()
            with Alive() as alive:
                farspan.flush()
            optimizer.step()
            return alive.peak_bytes

        step()  # the first one also runs on fakes
        return max(step() for _ in range(4))  # in one of them a message comes early, or late

    return run_threads(num_ranks, program)


@pytest.mark.parametrize("remat", [True, ["blocks.*"]])
def test_computing_each_block_again_lowers_the_peak_on_every_rank(remat: Any) -> None:
    for num_ranks, least in ((1, [0.5]), (2, [0.4, 0.75])):  # the last rank has one micro-batch at a time as it is
        kept, again = peaks(num_ranks, False), peaks(num_ranks, remat)
        assert all(new < share * old for new, share, old in zip(again, least, kept, strict=True)), (kept, again)


class Plain(nn.Module):
    """No module lists: on two ranks each of its three parts is called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.first, self.last = Block(16, 2), Block(16, 2)
        self.head = nn.Linear(16, 17)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.first(self.embed(ids))))


def test_in_a_model_without_lists_each_leaf_is_computed_again() -> None:
    kept, again = peaks(2, False, make=Plain), peaks(2, True, make=Plain)
    assert again[0] < 0.6 * kept[0], (kept, again)


def test_one_backward_through_many_calls_of_a_model_holds_little_more_than_one() -> None:
    (kept,), (again,) = peaks(1, False, is_one_backward=True), peaks(1, ["blocks.*"], is_one_backward=True)
    assert again < 0.4 * kept, (kept, again)

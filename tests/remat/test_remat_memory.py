"""What is computed again is not there meanwhile: the bytes alive in a step, counted as they come and go."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.models import GPT
from tests.support.ranks import run_threads
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import farspan

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


def peaks(num_ranks: int, remat: Any, *, is_one_backward: bool = False) -> list[int]:
    """The most bytes that were alive at once in a step of six micro-batches, by rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = [GPT(width=16, blocks=4) for _ in range(num_ranks)]

    def program(rank: int) -> int:
        model: nn.Module = farspan.distribute(models[rank], remat=remat)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            losses = []
            for _ in range(6):
                losses.append(F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()))
                if not is_one_backward:
                    losses[-1].backward()
            if is_one_backward:
                torch.stack(losses).sum().backward()
            optimizer.step()

        step()  # the first one also runs on fakes
        optimizer.zero_grad()
        with Alive() as alive:
            step()
        return alive.peak_bytes

    return run_threads(num_ranks, program)


def test_a_rank_with_several_micro_batches_in_flight_needs_less_when_all_is_computed_again() -> None:
    kept, again = peaks(2, False), peaks(2, True)
    assert again[0] < 0.6 * kept[0], (kept, again)
    assert again[1] < 1.05 * kept[1], (kept, again)  # never more than one in flight


def test_computing_blocks_again_one_by_one_lowers_the_peak_on_every_rank() -> None:
    for num_ranks in (1, 2):
        for kept, again in zip(peaks(num_ranks, False), peaks(num_ranks, ["blocks.*"]), strict=True):
            assert again < 0.7 * kept, (num_ranks, kept, again)


def test_one_backward_through_many_calls_of_a_model_holds_little_more_than_one() -> None:
    (kept,), (again,) = peaks(1, False, is_one_backward=True), peaks(1, ["blocks.*"], is_one_backward=True)
    assert again < 0.4 * kept, (kept, again)

"""What a program has from before parameters moved, or while they lie in slices: the numbers of one process."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from tests.split.slices.harness import Act, assert_close, first, run
from tests.support.ranks import run_threads
from tests.wide.loops import Net, loss_of
from torch import nn

import farspan
from farspan.errors import RecordError
from farspan.execute.process.world import current_engine

LOOPS: dict[str, Act] = {}


def loop(function: Act) -> Act:
    LOOPS[function.__name__] = function
    return function


@loop
def freezes_behind_the_forward(model: Any, optimizer: Any, step: int) -> Any:
    """Once while parameters are in slices, once after they have come home."""
    if step not in (4, 7):
        return None
    optimizer.zero_grad()
    loss = loss_of(model, 3)
    if step == 7:
        model.blocks[2].a.bias.data.mul_(0.9)
    first(model).requires_grad_(False)
    loss.backward()
    first(model).requires_grad_(True)
    return [float(p.grad is None) for p in model.parameters()]


@loop
def steps_another_optimizer_before_the_backward(model: Any, optimizer: Any, step: int) -> Any:
    if step != 5:
        return None
    loss = loss_of(model, 3)
    model.blocks[2].a.bias.data.mul_(0.9)
    torch.optim.SGD([model.head.bias], lr=0.1).step()
    loss.backward()
    return [float(p.grad.norm()) for p in model.parameters()]


@loop
def keeps_views_of_parameters(model: Any, optimizer: Any, step: int) -> Any:
    """They see what steps make of the parameter, and what is written into them is in it."""
    if step == 4:
        state = model.state_dict()
        model.kept = [first(model).data, model.blocks[1].a.weight.data[0], state["blocks.2.b.weight"]]
    if step < 5:
        return None
    seen = [float(kept.norm()) for kept in model.kept]
    if step in (6, 7):
        for kept in model.kept:
            kept.mul_(0.9)
    return seen


@loop
def makes_weak_references(model: Any, optimizer: Any, step: int) -> Any:
    if step == 4:
        model.kept = [weakref.ref(p) for p in model.parameters()]
    if step == 6:
        first(model).data.mul_(0.9)
        return [float(reference() is p) for reference, p in zip(model.kept, model.parameters(), strict=True)]
    return None


@loop
def writes_in_inference_mode(model: Any, optimizer: Any, step: int) -> None:
    if step == 5:
        with torch.inference_mode():
            first(model).mul_(0.9)


class Scaled(nn.Module):
    """What a program puts around a module, as adapters are."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.scale = base, nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.scale


@loop
def wraps_frozen_modules(model: Any, optimizer: Any, step: int) -> None:
    if step == 4:
        model.requires_grad_(False)
        for block in model.blocks:
            block.a, block.b = Scaled(block.a), Scaled(block.b)


def test_a_hook_behind_the_forward_is_an_error() -> None:
    """Backwards bring gradients of slices, of which the hook would see none."""

    def act(model: Any, optimizer: Any, step: int) -> None:
        if step == 4:
            loss = loss_of(model, 3)
            if current_engine() is not None:
                first(model).register_hook(lambda gradient: gradient)
            loss.backward()

    with pytest.raises(RecordError, match=r"slices of .*, which has a hook"):
        run(act)


def test_what_autograd_has_kept_is_written() -> None:
    """The backward needs what was there: an error of torch, as with whole parameters."""

    def act(model: Any, optimizer: Any, step: int) -> None:
        if step == 4 and current_engine() is not None:
            loss = loss_of(model, 3)
            model.blocks[1].b.weight.data.mul_(0.5)
            loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(act)


def test_one_rank_holds_what_others_do_not() -> None:
    """An optimizer, and the state of one: all ranks agree that parameters stay whole."""

    def on_rank(rank: int) -> Any:
        torch.manual_seed(3)
        model = farspan.distribute(Net(), tensor_parallel=2)
        held: list[Any] = []
        for step in range(9):
            if step % 3 == 0:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                held += [optimizer, *([optimizer.state] if step == 3 else [])] if rank == 0 else []
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        return [item.tolist() for item in model.state_dict().values()]

    with torch.random.fork_rng():
        one, other = run_threads(2, on_rank)
    assert_close(one, other)


@pytest.mark.parametrize("name", LOOPS)
def test_one_process_within_rounding(name: str) -> None:
    wanted, found = run(LOOPS[name])
    for seen, _ in found:
        assert_close(seen, wanted)
    assert max(found[0][1]) >= 8, "the loop has been in slices"

"""`x.detach_()` cuts the graph behind a recorded tensor; what was computed from it before keeps its history."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.plainly import X, assert_same_as_plainly
from torch import Tensor, nn

CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda out: out.detach_(),
    "function": lambda out: torch.detach_(out),
    "part": lambda out: out.max(1)[0].detach_(),
    "twice": lambda out: out.detach_().detach_(),
}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))


@pytest.mark.parametrize("cut", CUTS)
def test_no_gradient_flows_behind_a_cut(cut: str) -> None:
    def program(model: Any) -> Any:
        target = CUTS[cut](model(2 * X))
        loss = (model(X).mean() - target).square().mean()
        loss.backward()
        return loss.item(), target.requires_grad, target.is_leaf, [p.grad.tolist() for p in model.parameters()]

    assert_same_as_plainly(build, program, 2)


def test_what_was_computed_before_the_cut_has_its_history() -> None:
    def program(model: Any) -> Any:
        out = model(X)
        before, same = out * 2, out
        out.detach_()
        (before * out).sum().backward()
        return same.requires_grad, before.requires_grad, [p.grad.tolist() for p in model.parameters()]

    assert_same_as_plainly(build, program, 2)


def test_a_write_after_the_cut_shows_in_the_tensor() -> None:
    def program(model: Any) -> Any:
        out = model(X)
        view = out.detach()
        out.detach_()
        out.add_(1)
        loss = (model(X) * out).sum()
        loss.backward()
        return loss.item(), view.tolist(), out.tolist(), [p.grad.tolist() for p in model.parameters()]

    assert_same_as_plainly(build, program, 2)


def test_state_that_is_cut_in_place_goes_on_to_the_next_micro_batch() -> None:
    def program(model: Any) -> Any:
        optimizer, state, losses = torch.optim.SGD(model.parameters(), 0.1), torch.zeros(6, 5), []
        for _ in range(2):
            optimizer.zero_grad()
            for shift in range(3):
                state = torch.tanh(model(X + shift) + state)
                loss = state.square().mean()
                loss.backward()
                state.detach_()
                losses.append(loss.detach())
            optimizer.step()
        return [loss.item() for loss in losses]

    assert_same_as_plainly(build, program, 2)

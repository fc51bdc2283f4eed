"""Modules whose parameters are frozen, in backwards that go through several micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tests.support.ranks import run_threads
from torch import nn

import farspan


def test_one_backward_goes_through_two_micro_batches_with_a_frozen_module() -> None:
    """The call between the two losses ends the first micro-batch; no gradient of the frozen layer is added up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].requires_grad_(False)

    def train(each: nn.Module) -> list[Any]:
        one = each(torch.ones(2, 4)).sum()
        with torch.no_grad():
            each(torch.ones(2, 4))
        two = each(torch.full((3, 4), 0.5)).sum()
        (one + two).backward()
        return [None if item.grad is None else item.grad.tolist() for item in each.parameters()]

    expected = train(copy.deepcopy(model))

    def program(rank: int) -> list[Any]:
        own = copy.deepcopy(model)
        farspan.distribute(own)
        return train(own)

    assert run_threads(2, program) == [expected, expected]


def test_a_module_is_called_frozen_and_trained_in_one_backward() -> None:
    """As in Dreamer's imagination: what is frozen at its call gets no gradient from it, whatever it is later."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)])

    def train(each: Any) -> list[Any]:
        hidden = torch.tanh(each[0](torch.ones(2, 4)))
        found = []
        for is_first_frozen in (True, False):
            each.zero_grad()
            each[1].requires_grad_(not is_first_frozen)
            one = each[1](hidden.detach())
            each[1].requires_grad_(is_first_frozen)
            two = each[1](hidden.detach() * 2)
            each[1].requires_grad_(True)
            each[2](torch.tanh(one * two)).sum().backward()
            found.append([None if item.grad is None else item.grad.tolist() for item in each.parameters()])
        return found

    expected = train(copy.deepcopy(model))

    def program(rank: int) -> list[Any]:
        own = copy.deepcopy(model)
        farspan.distribute(own)
        return train(own)

    assert run_threads(2, program) == [expected, expected]

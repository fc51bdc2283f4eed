"""Loading what the program has computed from weights, and parameters themselves; and printing parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.plainly import X, assert_same_as_plainly
from tests.support.ranks import run_threads
from torch import nn

import farspan


class Pair(nn.Module):
    """A model and its target."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = (nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(2))


def rewind_pruned(model: Any) -> Any:
    """The first weights, but for those that have become small: a lottery ticket."""
    first = {name: item.clone() for name, item in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, optimizer)
    masks = {name: (p.detach().abs() > 0.2).float() for name, p in model.named_parameters() if p.dim() > 1}
    model.load_state_dict({name: item * masks[name] if name in masks else item for name, item in first.items()})
    step(model, optimizer)
    return {name: item.tolist() for name, item in model.state_dict().items()}


def follow(model: Any) -> Any:
    """A target that is given the parameters themselves, half of them, and a mean."""
    optimizer = torch.optim.SGD(model.online.parameters(), 0.1)
    step(model, optimizer)
    model.target.load_state_dict(dict(model.online.named_parameters()))
    step(model, optimizer)
    model.target.load_state_dict({name: p * 0.5 for name, p in model.online.named_parameters()})
    step(model, optimizer)
    own = dict(model.target.named_parameters())
    mean = {name: 0.9 * own[name].data + 0.1 * p.data for name, p in model.online.named_parameters()}
    model.target.load_state_dict(mean)
    step(model, optimizer)
    model.online.load_state_dict(model.target.state_dict(keep_vars=True))
    return {name: item.tolist() for name, item in model.state_dict().items()}


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (model.online(X) - model.target(X).detach()).pow(2).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("program", [rewind_pruned, follow])
def test_what_the_program_has_computed_can_be_loaded(program: Any, num_ranks: int) -> None:
    assert_same_as_plainly(Pair, program, num_ranks)


def test_a_parameter_is_printed_as_one_on_every_rank() -> None:
    torch.manual_seed(0)
    models = [Pair()]
    models.append(copy.deepcopy(models[0]))
    wanted = [repr(p) for p in models[0].parameters()], str(models[0].target[0].bias)

    def shown(rank: int) -> Any:
        model = farspan.distribute(models[rank])
        return [repr(p) for p in model.parameters()], str(model.target[0].bias)

    assert run_threads(2, shown) == [wanted, wanted]

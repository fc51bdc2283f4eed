"""Slices of the parameters of several optimizers: each one's come and go by themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.ranks import run_threads
from tests.wide.loops import Net, loss_of
from torch import nn

import farspan
from farspan.execute.process.world import current_engine


def num_in_slices(model: Any) -> int:
    engine = current_engine()
    if engine is None:
        return 0
    ids = {id(item) for item in model.parameters()}
    return sum(id(engine.parameters[name].tensor) in ids for name in engine.slices.owned.slices)


def trained(model: Any) -> tuple[list[float], int]:
    """Returns losses, norms and weights to the last bit, and how many parameters lie in slices at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[float] = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        found.append(loss.item())
    found += [number for item in model.state_dict().values() for number in item.flatten().tolist()]
    return found, num_in_slices(model)


def test_what_is_trained_twice_in_one_program_has_the_same_bits() -> None:
    """Norms of slices round otherwise than those of wholes; the second model's stayed whole for longer."""
    nets = [[Net().eval() for _ in range(3)] for _ in range(2)]
    for net in [net for row in nets for net in row]:
        net.load_state_dict(nets[0][0].state_dict())

    def on_rank(rank: int) -> list[tuple[list[float], int]]:
        return [trained(farspan.distribute(net, tensor_parallel=2)) for net in nets[rank]]

    for runs in run_threads(2, on_rank):
        assert runs[0] == runs[1] == runs[2]
        assert runs[0][1] >= 8


def alternately(model: Any, changed_at: int) -> tuple[list[Any], list[tuple[int, int]]]:
    """Two optimizers, one of them another one from a step on; the first one's parameters step twice as often."""
    near, far = model.blocks[0], model.blocks[1:]
    optimizers: list[Any] = [
        torch.optim.Adam(near.parameters(), lr=1e-2),
        torch.optim.RMSprop(far.parameters(), lr=1e-3),
    ]
    seen: list[Any] = []
    numbers: list[tuple[int, int]] = []
    for step in range(12):
        model.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizers[0].step()
        if step % 2:
            optimizers[1].step()
        if step == changed_at:
            optimizers[1] = torch.optim.SGD(far.parameters(), lr=1e-2, momentum=0.9)
        seen.append(loss.item())
        numbers.append((num_in_slices(near), num_in_slices(far)))
    seen += [item.tolist() for item in model.state_dict().values()]
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    seen += [item.tolist() for state in states for kept in state.values() for item in kept.values() if item is not None]
    return seen, numbers


@pytest.mark.parametrize("changed_at", [99, 7], ids=["two", "one_is_replaced"])
def test_each_optimizer_has_its_own(changed_at: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = Net().eval()
    wanted, _ = alternately(copy.deepcopy(net), changed_at)
    nets = [copy.deepcopy(net) for _ in range(2)]
    ranks = run_threads(2, lambda rank: alternately(farspan.distribute(nets[rank], tensor_parallel=2), changed_at))
    for seen, numbers in ranks:
        for one, other in zip(seen, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=2e-4, atol=2e-5)
        assert numbers == ranks[0][1]
        assert numbers[6] == (3, 6), "both lie in slices"
        is_home = [num_near == 3 and num_far == 0 for num_near, num_far in numbers[7:]]
        assert any(is_home) == (changed_at == 7), "those of one come home alone"

"""What a group is asked of its optimizers' states is what they were when it was asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from farspan.execute.optimizers.states import OptimizerStates
from farspan.execute.shards.optimizer_states import DividedStates


def test_an_answer_is_a_copy_for_the_program_may_write_into_the_state_before_it_has_gone() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones(3)
    optimizer.step()
    handlers: dict[str, Any] = {}
    held: Any = SimpleNamespace(tensor=parameter)
    states = OptimizerStates({"w": held})
    states.add(optimizer)
    number = states.number_of(optimizer)
    engine: Any = SimpleNamespace(values=SimpleNamespace(optimizers=states), parameters=states.parameters)
    homes: Any = SimpleNamespace(is_here=lambda item: True)
    peers: Any = SimpleNamespace(answer_with=handlers.update)
    divided = DividedStates(engine, homes, peers)
    kept = optimizer.state[parameter]["exp_avg"]
    before = kept.clone()
    header, tensors = handlers["state"]((number, "w"))
    kept.mul_(0.5)
    found = OptimizerStates.unpack(header, tensors)
    assert found["exp_avg"].equal(before) and not found["exp_avg"].equal(kept)
    assert not divided.is_divided(optimizer)

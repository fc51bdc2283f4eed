"""What a group is asked of its optimizers' states is what they were when it was asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from farspan.call.infer.entry import meta_of
from farspan.errors import RecordError
from farspan.execute.optimizers.own import is_own, make_known_as, make_own
from farspan.execute.optimizers.states import OptimizerStates
from farspan.execute.shards.optimizer_states import DividedStates
from farspan.graph import Value


def two_groups(optimizer: Any, parameter: Any, *, is_here: bool) -> tuple[DividedStates, OptimizerStates, Any, Any]:
    """The states of an optimizer that has stepped, what answers other groups, and what this group asks them."""
    handlers: dict[str, Any] = {}
    asked: list[Any] = []
    item: Any = SimpleNamespace(tensor=parameter, name="w", meta=SimpleNamespace(device=None), is_owned=True)
    states = OptimizerStates({"w": item})
    states.add(optimizer)
    recorder = SimpleNamespace(placed={id(parameter): item})
    engine: Any = SimpleNamespace(
        values=SimpleNamespace(optimizers=states), parameters=states.parameters, recorder=recorder, num_ranks=1
    )
    homes: Any = SimpleNamespace(is_here=lambda item: is_here, rank_of=lambda item: 1)

    def ask(rank: int, kind: str, what: Any) -> Any:
        asked.append((rank, kind, what))
        return OptimizerStates.pack({"momentum_buffer": torch.full((3,), 7.0)}, torch.device("cpu"))

    peers: Any = SimpleNamespace(answer_with=handlers.update, ask=ask)
    return DividedStates(engine, homes, peers), states, handlers, asked


def stepped() -> tuple[torch.optim.Optimizer, nn.Parameter]:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(3)
    optimizer.step()
    return optimizer, parameter


def test_a_slower_group_is_told_of_an_optimizer_that_this_one_has_released() -> None:
    """`save(optimizer.state_dict())` and then another optimizer: one group is there before the other has read it."""
    optimizer, parameter = stepped()
    divided, states, handlers, _ = two_groups(optimizer, parameter, is_here=True)
    divided.divide(optimizer)
    del optimizer
    states.advance()  # this rank's program goes on
    found = OptimizerStates.unpack(*handlers["state"]((0, "w")))
    assert found["momentum_buffer"].tolist() == [1.0, 1.0, 1.0]
    divided.forget()  # all groups are at their next step
    with pytest.raises(RecordError, match="is no more on the rank"):
        handlers["state"]((0, "w"))


def test_a_rank_of_its_group_gets_what_another_group_keeps_for_one_that_is_released() -> None:
    optimizer, parameter = stepped()
    divided, states, _, asked = two_groups(optimizer, parameter, is_here=False)
    divided.divide(optimizer)
    del optimizer
    states.advance()
    found = OptimizerStates.unpack(*states.answer(0, "w"))
    assert asked == [(1, "state", [0, "w"])]
    assert found["momentum_buffer"].tolist() == [7.0, 7.0, 7.0]


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


def test_what_the_program_gets_of_its_state_has_no_marks_of_steps() -> None:
    optimizer, parameter = stepped()
    momentum = optimizer.state[parameter]["momentum_buffer"]
    make_known_as(make_own(momentum), Value(meta_of(momentum), 0))
    divided, _, _, _ = two_groups(optimizer, parameter, is_here=True)
    divided.divide(optimizer)
    assert vars(divided.whole(optimizer)[parameter]["momentum_buffer"]) == {}
    assert is_own(momentum)


@pytest.mark.parametrize("is_here", [True, False])
def test_what_is_kept_for_a_parameter_that_has_left_the_optimizer_stays(is_here: bool) -> None:
    optimizer, parameter = stepped()
    divided, _, _, _ = two_groups(optimizer, parameter, is_here=is_here)
    divided.divide(optimizer)
    optimizer.param_groups[0]["params"] = []
    divided.gather(optimizer)
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [1.0 if is_here else 7.0] * 3

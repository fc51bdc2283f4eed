"""A distributed model may be copied: averaged models, teachers, the best one so far."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, on_ranks, same_everywhere, steps, weights
from torch import nn
from torch.optim import swa_utils

import farspan
from farspan.errors import DivergenceError
from farspan.execute.process.world import current_engine
from farspan.record.memory.parameter_copies import Copies
from farspan.record.tensor import StubParameter

_Distribute = Callable[[nn.Module], nn.Module]


@pytest.mark.parametrize("decay", [None, 0.9])
def test_averaged_models_work_as_before(decay: float | None) -> None:
    average = None if decay is None else swa_utils.get_ema_multi_avg_fn(decay)

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        averaged = swa_utils.AveragedModel(model, multi_avg_fn=average)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = swa_utils.SWALR(optimizer, swa_lr=0.05)
        for _ in range(3):
            steps(model, optimizer, 1)
            averaged.update_parameters(model)
            schedule.step()
        averaged.eval()
        with torch.no_grad():
            return averaged(X).tolist(), weights(averaged), weights(model)

    same_everywhere(program)


def test_a_copy_trains_apart_from_its_model() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps(model, optimizer)
        other = copy.deepcopy(model)
        best = copy.deepcopy(model.state_dict())
        again = torch.optim.AdamW(other.parameters(), lr=1e-1)
        seen = [steps(model, optimizer), steps(other, again)]
        with torch.no_grad():
            target = other(X).softmax(-1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), target)
        loss.backward()
        optimizer.step()
        state = weights(model)
        model.load_state_dict(best)
        return seen, loss.item(), state, weights(other), weights(model)

    same_everywhere(program)


def test_a_part_of_a_model_may_be_copied_and_frozen() -> None:
    def program(model: Any, distribute: _Distribute) -> Any:
        distribute(model)
        head = copy.deepcopy(model.head).requires_grad_(False)
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with torch.no_grad():
            hidden = torch.ones(2, model.head.in_features)
            return head(hidden).tolist(), model.head(hidden).tolist(), [p.grad is None for p in head.parameters()]

    same_everywhere(program, 2)


def test_a_copy_lies_where_its_model_does() -> None:
    def program(model: nn.Module) -> list[bool]:
        farspan.distribute(model)
        other = copy.deepcopy(model)
        here = [isinstance(p, StubParameter) for p in model.parameters()]
        assert [isinstance(p, StubParameter) for p in other.parameters()] == here
        assert type(other) is type(model) and list(other.state_dict()) == list(model.state_dict())
        return here

    elsewhere = on_ranks(2, program)
    assert all(first != second for first, second in zip(*elsewhere, strict=True))


def test_parameters_copied_without_their_module_are_plain_values() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        before = copy.deepcopy(list(model.parameters()))
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
        moved = [(p.detach() - old.detach()).norm().item() for p, old in zip(model.parameters(), before, strict=True)]
        return [p.tolist() for p in before], moved, [type(p).__name__ for p in before]

    same_everywhere(program, 2)


def test_a_copy_on_one_rank_alone_is_named_at_once() -> None:
    def program(model: nn.Module) -> None:
        farspan.distribute(model)
        engine = current_engine()
        assert engine is not None
        if engine.rank == 1:
            copy.deepcopy(model)
        F.cross_entropy(model(X), Y).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    with pytest.raises(DivergenceError, match=r"copy\.deepcopy of a model"):
        on_ranks(2, program)


def test_after_a_write_into_a_copy_of_a_parameter_nothing_older_is_used() -> None:
    done: list[str] = []
    groups = SimpleNamespace(end_write=lambda: done.append("may go on"))
    here = SimpleNamespace(groups=groups, parameters_changed=lambda: done.append("older ones are forgotten"))
    copies: Any = SimpleNamespace(_recorder=SimpleNamespace(engine=here), _of=lambda tensor: [])
    Copies.after(copies, (torch.ones(1),), {})
    assert done == ["older ones are forgotten", "may go on"]

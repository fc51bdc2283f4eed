"""Deferred weight gradients, of activations that are computed again."""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any

import pytest
import torch
from tests.remat.test_remat_memory import peaks
from tests.support.cases import CASES
from tests.support.parity import build, last_plan, train, train_plainly
from tests.support.ranks import run_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farspan
from farspan.call.remat.unit import Unit
from farspan.execute.backward.split import split_backward
from farspan.execute.process.world import current_engine


@pytest.mark.parametrize("remat", [True])
@pytest.mark.parametrize("name", CASES)
def test_same_numbers_where_every_backward_is_split(name: str, remat: Any) -> None:
    case = CASES[name]
    wanted = train_plainly(case)
    for plan_name, plan in last_plan(case, 2).items():
        models = [build(case) for _ in range(2)]

        def program(rank: int) -> Any:
            model = farspan.distribute(models[rank], plan=plan, remat=remat)  # noqa: B023
            engine = current_engine()
            assert engine is not None
            engine.schedule, engine.least_weight_work_s = "zero-bubble", -math.inf
            return train(model, case)

        for rank, history in enumerate(run_threads(2, program)):
            assert history.differences(wanted) == [], f"plan {plan_name}, rank {rank}"


class Steps(nn.Module):
    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 7), nn.Conv1d(7, 7, 1), nn.Linear(7, 7)
        self.is_checkpointed = is_checkpointed
        self.num_calls = 0
        self.made: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        x = self._keep(torch.tanh(self.a(x)))
        x = self._keep(self.b(x.t().unsqueeze(0)).exp())[0].t()
        return checkpoint(self.c, x, use_reentrant=False) if self.is_checkpointed else self.c(x)  # type: ignore[return-value]

    def _keep(self, x: Tensor) -> Tensor:
        self.made.append(weakref.ref(x.untyped_storage()))
        return x

    @property
    def num_there(self) -> int:
        return sum(reference() is not None for reference in self.made)


def in_a_unit(module: nn.Module, x: Tensor) -> Tensor:
    unit = Unit("steps", [x, *module.parameters()])
    inner = x.detach().requires_grad_()
    with unit.saving():
        result = module(x)
    unit.release(lambda: torch.enable_grad()(module)(inner))
    return result


def test_the_weights_wait_and_nothing_runs_a_third_time() -> None:
    torch.manual_seed(0)
    plain = Steps()
    model = copy.deepcopy(plain)
    x, wanted_x = (torch.linspace(-1, 1, 30).view(5, 6).requires_grad_() for _ in range(2))
    plain(wanted_x).square().mean().backward()
    loss = in_a_unit(model, x).square().mean()
    assert (model.num_calls, model.num_there) == (1, 0)

    split = split_backward([loss], [x], [])
    assert {border.node.name() for border in split.borders} == {"AddmmBackward0", "ConvolutionBackward0"}
    deferred = split.run_first_half([loss], [None])
    assert deferred is not None
    assert x.grad is not None and wanted_x.grad is not None and torch.equal(x.grad, wanted_x.grad)
    assert [parameter.grad for parameter in model.parameters()] == [None] * 6
    assert (model.num_calls, model.num_there) == (2, 2)

    deferred.run()
    for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None and wanted.grad is not None and torch.equal(parameter.grad, wanted.grad)
    assert (model.num_calls, model.num_there) == (2, 0)


def test_a_checkpoint_inside_does_not_wait() -> None:
    model = Steps(is_checkpointed=True)
    x = torch.ones(5, 6, requires_grad=True)
    split = split_backward([in_a_unit(model, x).sum()], [x], [])
    waiting = [item for border in split.borders for found in border.targets.values() for item in found]
    assert {id(item.variable) for item in waiting} == {
        id(item) for part in (model.a, model.b) for item in part.parameters()
    }


def test_the_memory_of_one_backward_at_most_is_held_for_its_weights() -> None:
    kept = peaks(2, False, is_split=True)
    for remat in (True, ["*"]):
        again = peaks(2, remat, is_split=True)
        assert again[0] < 0.5 * kept[0] and again[1] < 0.7 * kept[1], (remat, kept, again)

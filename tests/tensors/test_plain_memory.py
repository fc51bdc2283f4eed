"""Recorded values are written into plain memory that every rank has: averages of a model, tables, arrays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, mlp, on_ranks, weights
from tests.support.ranks import run_threads
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import farspan
from farspan.errors import RecordError
from farspan.execute.values import SharedValues


def pairs(average: nn.Module, model: nn.Module) -> Any:
    return zip(average.parameters(), model.parameters(), strict=True)


@torch.no_grad()
def mul_add(average: nn.Module, model: nn.Module) -> None:
    for a, p in pairs(average, model):
        a.mul_(0.9).add_(p, alpha=0.1)


@torch.no_grad()
def copy_computed(average: nn.Module, model: nn.Module) -> None:
    for a, p in pairs(average, model):
        a.copy_(0.9 * a + 0.1 * p)


def data_copy(average: nn.Module, model: nn.Module) -> None:
    for a, p in pairs(average, model):
        a.data.copy_(p.data * 0.1 + a.data * 0.9)


def data_set(average: nn.Module, model: nn.Module) -> None:
    for a, p in pairs(average, model):
        a.data = a.data * 0.9 + p.data * 0.1


@torch.no_grad()
def into_views(average: nn.Module, model: nn.Module) -> None:
    for a, p in pairs(average, model):
        a.view(-1)[1:].lerp_(p.view(-1)[1:], 0.1)


def load(average: nn.Module, model: nn.Module) -> None:
    average.load_state_dict(model.state_dict())


@torch.no_grad()
def foreach(average: nn.Module, model: nn.Module) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)


WAYS = [mul_add, copy_computed, data_copy, data_set, into_views, load, foreach]


def averaged(distribute: Callable[[nn.Module], nn.Module], model: nn.Module) -> Any:
    averages = [copy.deepcopy(model) for _ in WAYS]
    swa = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    model = distribute(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        swa.update_parameters(model)
        for way, average in zip(WAYS, averages, strict=True):
            way(average, model)
    return [[weights(item), item(X).tolist()] for item in (*averages, swa)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_average_that_was_copied_before_distribute_follows_the_model(num_ranks: int) -> None:
    wanted = averaged(lambda model: model, mlp())
    for got in on_ranks(num_ranks, lambda model: averaged(farspan.distribute, model)):
        for way, mine, plainly in zip([*WAYS, "swa"], got, wanted, strict=True):
            assert mine == plainly, way


def test_an_average_over_many_parameters_takes_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = []
    ask = SharedValues._ask
    monkeypatch.setattr(SharedValues, "_ask", lambda self, *args: [requests.append(args), ask(self, *args)][1])

    def program(model: nn.Module) -> None:
        average = copy.deepcopy(model)
        model = farspan.distribute(model)
        for _ in range(2):
            requests.clear()
            farspan.flush()
            mul_add(average, model)
            model(X).sum().item()  # all have read when the last one has

    on_ranks(2, program, lambda: nn.Sequential(*[nn.Linear(12, 12) for _ in range(20)]))
    assert len(requests) <= 8  # 40 parameters


def counted(model: nn.Module) -> Any:
    table, histogram, rows = torch.zeros(5, 5, dtype=torch.long), torch.zeros(5), list(torch.zeros(6, 5))
    array, shared = np.zeros((5, 5), dtype=int), np.zeros((6, 5), dtype=np.float32)
    with torch.no_grad():
        out = model(X)
        guess = out.argmax(1)
        for t, p in zip(Y, guess, strict=True):
            table[t, p] += 1
            array[t, p] += 1
        table[Y.long(), guess] += 1
        table += torch.bincount(5 * Y + guess, minlength=25).reshape(5, 5)
        histogram.index_add_(0, guess, torch.ones(6)).scatter_add_(0, guess, torch.ones(6))
        for i, row in enumerate(out):
            rows[i].copy_(row)
        view = torch.from_numpy(shared)
        view[2:4] = out[2:4]
        view[0][1] = out[0, 1]
    return table.tolist(), array.tolist(), histogram.tolist(), [row.tolist() for row in rows], shared.tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_a_model_says_is_counted_in_plain_tensors(num_ranks: int) -> None:
    wanted = counted(mlp())
    for got in on_ranks(num_ranks, lambda model: counted(farspan.distribute(model))):
        assert got == wanted


class Codes(nn.Module):
    """The first batch is its codebook, and it holds nothing but buffers: no rank owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: torch.Tensor
        self.register_buffer("codes", torch.zeros(6, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.codes.any():
            self.codes.data.copy_(x)
        return x - self.codes


def around_codes(part: Callable[[], nn.Module] = Codes) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), part(), nn.Linear(12, 5))


def with_codes(model: nn.Module) -> Any:
    for _ in range(2):
        F.cross_entropy(model(X + 1), Y).backward()
    return [item.grad.tolist() for item in model.parameters() if item.grad is not None], weights(model)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_carries_gradient_is_written_into_the_data_of_a_buffer(num_ranks: int) -> None:
    wanted = with_codes(around_codes())
    for got in on_ranks(num_ranks, lambda model: with_codes(farspan.distribute(model)), around_codes):
        assert got == wanted


class Alias(Codes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = self.codes.data
        codes.copy_(x)
        return x - 2 * codes


def test_gradient_that_comes_to_the_data_of_a_buffer_is_refused() -> None:
    with pytest.raises(RecordError, match="whose memory others use too"):
        on_ranks(2, lambda model: with_codes(farspan.distribute(model)), lambda: around_codes(Alias))


HOLDS: dict[str, Any] = {"storage": torch.Tensor.untyped_storage, "view": lambda x: x.view(-1).untyped_storage()}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_what_is_written_is_in_the_storage_that_the_program_holds(hold: Any) -> None:
    """The tensor became a recorded one, and the storage kept what had been there before."""

    def run(rank: int) -> list[float]:
        layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with torch.no_grad():
            for parameter in layers.parameters():
                parameter.fill_(1.0)
        model = farspan.distribute(layers, plan={"0": "rank:0", "1": "rank:1"})
        best = torch.zeros(2)
        held = hold(best)
        with torch.no_grad():
            best.copy_(model(torch.ones(2)))
        return torch.empty(0).set_(held).tolist()  # type: ignore[call-overload]

    assert run_threads(2, run) == [[7.0, 7.0]] * 2

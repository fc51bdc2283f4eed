"""Writes in place: through views, into plain tensors and buffers, into parts of parameters; as in the plain program."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import X, Y, assert_same_as_plainly, train
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import RecordError


def column_of(x: Tensor) -> Tensor:
    x[:, 0] = 0
    x[..., -1] *= 2
    return x


def through_views(x: Tensor) -> Tensor:
    x.view(-1).add_(1)
    x[:, 1].mul_(2)
    x.unsqueeze(0).squeeze(0)[0].zero_()
    return x


def of_the_base_with_a_view_in_use(x: Tensor) -> Tensor:
    view = x[:, :4]
    x.add_(1)
    return torch.cat([view, x[:, 4:]], 1)


def of_a_view_with_others_in_use(x: Tensor) -> Tensor:
    row, flat = x[0], x.view(-1)
    x.add_(1)
    row.mul_(2)
    flat[3:9].zero_()
    return x * row + flat.view(6, 8)


def of_a_view_of_a_view(x: Tensor) -> Tensor:
    y = x.clone()
    y.T[0] = 3
    y[:, 2:5][1:] *= 2
    return y


def of_detached_memory(x: Tensor) -> Tensor:
    x.data.clamp_(-0.5, 0.5)
    return x


def into_a_plain_tensor(x: Tensor) -> Tensor:
    out = torch.zeros(6, 8)
    early = out * 2 + x  # has the zeros
    out[:, :4] = x[:, :4]
    out[2] += 1
    return out + early


def into_a_plain_tensor_by_rows(x: Tensor) -> Tensor:
    out = torch.empty(6, 8)
    for number in range(6):
        out[number] = x[5 - number]
    return out


def into_a_plain_sum(x: Tensor) -> Tensor:
    out = torch.zeros(12, 8)
    out += 1
    out.index_add_(0, torch.arange(6), x)
    out.scatter_add_(0, torch.zeros(6, 8, dtype=torch.long), x)
    return out[:6]


class Writes(nn.Module):
    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.write(torch.tanh(self.b(self.write(self.a(x)))) * 1))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "write",
    [
        column_of, through_views, of_the_base_with_a_view_in_use, of_a_view_with_others_in_use, of_a_view_of_a_view,
        of_detached_memory, into_a_plain_tensor, into_a_plain_tensor_by_rows, into_a_plain_sum,
    ],
)  # fmt: skip
def test_a_write_shows_wherever_it_does_in_the_plain_program(write: Callable[[Tensor], Tensor], num_ranks: int) -> None:
    assert_same_as_plainly(lambda: Writes(write), train, num_ranks)


# Buffers of containers.


class Counting(nn.Module):
    """Keeps what it has seen in buffers of its own, in one of several ways."""

    mean: Tensor
    number: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("number", torch.tensor(0))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        if self.how == "set again":
            self.mean = self.mean + x.detach().mean(0)
            self.number = self.number + 1
        elif self.how == "in place":
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.number += 1
        else:
            with torch.no_grad():
                self.mean[:4] = x.mean(0)[:4]
                self.mean.lerp_(x.mean(0), 0.5)
                self.number.fill_(3)
        return self.c(x + self.mean / 10)


def saved_and_loaded(model: Any) -> Any:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = train(model)
    model.load_state_dict(before)
    loaded = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return first, loaded, train(model), model.mean.tolist(), model.number.item()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("how", ["set again", "in place", "in parts"])
def test_buffers_that_a_container_writes_are_kept_saved_and_loaded(how: str, num_ranks: int) -> None:
    assert_same_as_plainly(lambda: Counting(how), saved_and_loaded, num_ranks)


class Ranged(nn.Module):
    """Has no parameters, and keeps what it has seen."""

    highest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("highest", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.highest = torch.max(self.highest, x.detach().max())
        return x / (1 + self.highest)


class WithRange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), Ranged(), nn.Linear(8, 8))
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def test_a_part_without_parameters_that_no_plan_names_keeps_its_buffers_where_its_module_runs() -> None:
    plan = {"first.0": "rank:0", "first.2": "rank:0", "last": "rank:1"}
    assert_same_as_plainly(WithRange, train, 2, plan=plan)


# Parameters and gradients, in part.


class Plain(Writes):
    def __init__(self) -> None:
        super().__init__(torch.tanh)


def written_in_part(model: Any) -> Any:
    with torch.no_grad():
        model.a.weight[0].zero_()
        model.b.weight.data[:, 1].fill_(3)
        model.c.weight[2, 3:5] = 1
        row = model.a.weight[1]
        row.mul_(2)
        seen = row.sum().item()
        row += 1
    first = train(model)
    F.cross_entropy(model(X), Y).backward()
    with torch.no_grad():
        model.b.weight.grad[0].zero_()
        model.c.weight.grad.view(-1)[:4].mul_(2)
    return seen, first, train(model), [p.grad.tolist() for p in model.parameters()]


def averaged_outside(model: Any) -> Any:
    """An exponential average kept in plain tensors."""
    average = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                average[name].mul_(0.9).add_(parameter, alpha=0.1)
    return {name: tensor.tolist() for name, tensor in average.items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("program", [written_in_part, averaged_outside])
def test_parameters_and_gradients_are_written_in_part_and_averaged(program: Any, num_ranks: int) -> None:
    assert_same_as_plainly(Plain, program, num_ranks)


class Tied(Plain):
    """Its last part has the weights of its first one."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(8, 8, False)
        self.c.weight = self.a.weight


def between_forward_and_backward(model: Any) -> Any:
    """Weights are doubled for each forward and put back before the backward: autograd does not see `.data` do it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = [model.a.weight, model.b.weight]
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        total: Any = 0.0
        for _ in range(2):
            for weight in weights:
                weight.data.mul_(2)
            total = total + F.cross_entropy(model(X), Y) + sum(p.square().sum() for p in model.parameters())
            weights[0].data[1:].mul_(0.5)
            weights[0].detach().data[:1].mul_(0.5)
            weights[1].data = weights[1].data * 0.5
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses, {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("options", [{}, {"remat": True}, {"measure": False}])
def test_a_write_through_data_between_forward_and_backward_is_not_seen_by_autograd(options: Any) -> None:
    assert_same_as_plainly(Plain, between_forward_and_backward, 2, **options)


def test_a_write_through_data_that_another_rank_would_have_to_see_in_its_backward_is_a_named_error() -> None:
    models = [Tied() for _ in range(2)]
    plan = {"a": "rank:0", "b": "rank:0", "c": "rank:1"}
    with pytest.raises(RecordError, match=r"a\.weight was written through \.data"):
        run_threads(2, lambda rank: between_forward_and_backward(farspan.distribute(models[rank], plan=plan)))


def test_a_write_through_detach_between_forward_and_backward_is_torchs_own_error() -> None:
    def program(model: Any) -> None:
        loss = F.cross_entropy(model(X), Y)
        model.b.weight.detach().mul_(2)
        loss.backward()

    models = [Plain() for _ in range(3)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        program(models[2])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_threads(2, lambda rank: [program(farspan.distribute(models[rank])), farspan.flush()])


SCALE = torch.ones(8)


class Scales(nn.Module):
    """Autograd saves a plain tensor that the module holds, and one of a global."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale * SCALE


def read_before_the_backward(model: Any, scale: Tensor) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            loss = F.cross_entropy(model(X), Y)
            losses.append(loss.item())
            loss.backward()
            scale[:2].mul_(0.5)
        optimizer.step()
    return losses, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("measure", [True, False])
def test_a_plain_tensor_that_a_waiting_backward_needs_is_written(is_global: bool, measure: bool) -> None:
    def program(model: Any) -> Any:
        SCALE.fill_(1)
        return read_before_the_backward(model, SCALE if is_global else model[0].scale)

    num_ranks = 1 if is_global else 2  # threads would share the global
    assert_same_as_plainly(lambda: nn.Sequential(Scales(), nn.Linear(8, 5)), program, num_ranks, measure=measure)


def scaled_by_what_a_step_has_given(model: Any) -> Any:
    """A plain tensor that the loss of each micro-batch is given has a loss of the step before added to it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rates, level, losses = torch.ones(5), None, []
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(3):
            out = model(X)
            loss = F.cross_entropy(out, Y) + (out * rates).mean()
            loss.backward()
            if level is not None:
                rates.add_(level)
        optimizer.step()
        level = 0.1 * loss.detach()
        losses.append(loss.item())
    return losses, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("options", [{}, {"measure": False}])
def test_a_plain_tensor_is_written_with_a_recorded_value(num_ranks: int, options: Any) -> None:
    assert_same_as_plainly(Plain, scaled_by_what_a_step_has_given, num_ranks, **options)


# What is refused.


def into_a_view_of_a_plain_tensor(x: Tensor) -> Tensor:
    out = torch.zeros(6, 8)
    left = out[:, :4]
    left += x[:, :4]
    return out + x


def into_memory_of_an_array(x: Tensor) -> Tensor:
    import numpy as np

    array = np.zeros((6, 8), dtype=np.float32)
    torch.from_numpy(array).copy_(x.detach())
    return x + torch.from_numpy(array)


def test_a_write_into_memory_that_others_use_reaches_it() -> None:
    assert_same_as_plainly(lambda: Writes(into_memory_of_an_array), train, 2)


def test_a_write_into_memory_that_others_use_through_which_gradient_flows_is_a_named_error() -> None:
    models = [copy.deepcopy(Writes(into_a_view_of_a_plain_tensor)) for _ in range(2)]
    with pytest.raises(RecordError, match="whose memory others use too"):
        run_threads(2, lambda rank: farspan.distribute(models[rank])(X))

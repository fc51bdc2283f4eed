"""What the program holds of a parameter's memory since before `distribute` is one memory with it, on every rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, on_ranks, same_everywhere, steps, weights
from tests.support.plainly import X as ROWS
from tests.support.plainly import assert_same_as_plainly
from torch import nn

import farspan
from farspan.errors import PlanError

Distribute = Callable[[nn.Module], nn.Module]


def test_names_follow_the_parameter() -> None:
    def program(model: nn.Module, distribute: Distribute) -> Any:
        names = [p.data for p in model.parameters()]
        state, first_row = model.state_dict(), next(model.parameters()).detach()[1]
        model = distribute(model)
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return [name.tolist() for name in (*names, *state.values(), first_row)]

    same_everywhere(program)


def test_what_is_written_into_a_name_is_in_the_parameter() -> None:
    def program(model: nn.Module, distribute: Distribute) -> Any:
        names = [p.data for p in model.parameters()]
        model = distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps(model, optimizer, 1)
        for name in names:
            name.mul_(0.5)
        names[0][1] = 0.0
        return steps(model, optimizer, 1), weights(model), [name.tolist() for name in names]

    same_everywhere(program)


def test_parameters_that_are_parts_of_one_vector() -> None:
    def program(model: nn.Module, distribute: Distribute) -> Any:
        parameters = list(model.parameters())
        flat = torch.cat([p.data.view(-1) for p in parameters])
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.data = part.view_as(p)
        model = distribute(model)
        for _ in range(2):
            model.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            flat.add_(torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None]), alpha=-0.1)
        return weights(model), flat.tolist()

    same_everywhere(program)


def test_a_name_is_given_to_a_module() -> None:
    def program(model: nn.Module, distribute: Distribute) -> Any:
        name, other = model.state_dict(), nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        for parameter in other.parameters():
            nn.init.constant_(parameter, 0.1)
        weight = next(tensor for tensor in name.values() if tensor.shape[-1:] == (12,))
        model, other = distribute(model), distribute(other)
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
        return other(weight).tolist()

    same_everywhere(program, 2)


def test_another_model_loads_a_name() -> None:
    """One that a single rank owns: bringing it up to date on the others is no write, which all ranks would await."""

    def program(model: nn.Module, distribute: Distribute) -> Any:
        state, other = dict([next(iter(model.state_dict().items()))]), copy.deepcopy(model)
        model, other = distribute(model), distribute(other)
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
        other.load_state_dict(state, strict=False)
        return weights(other)

    same_everywhere(program, 2)


def _normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5), nn.BatchNorm1d(5))


def test_batch_statistics_follow_each_forward() -> None:
    def program(model: nn.Module) -> Any:
        state, found = model.state_dict(), []
        for shift in range(3):
            with torch.no_grad():
                model(ROWS + shift)
            found.append([tensor.tolist() for tensor in state.values()])
        return found

    assert_same_as_plainly(_normalised, program, 2)


def test_two_parameters_of_one_memory_are_refused() -> None:
    """Tied by `.data` they are two parameters, each stepped by itself, that only one process can keep one."""

    def build(begin: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        columns = torch.ones(8, 16)
        model[0].weight.data, model[1].weight.data = columns[:, :8], columns[:, begin : begin + 8]
        return model

    on_ranks(2, farspan.distribute, lambda: build(8))
    with pytest.raises(PlanError, match=r"the parameters 0.weight and 1.weight are one memory"):
        on_ranks(2, farspan.distribute, lambda: build(4))


def test_a_buffer_that_is_a_parameter_is_refused_where_ranks_have_them_apart() -> None:
    def build(of: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[1].register_buffer("seen", model[of].weight.data.t()[2:4])  # type: ignore[union-attr]
        return model

    on_ranks(2, farspan.distribute, lambda: build(1))
    with pytest.raises(PlanError, match=r"the parameter 0.weight and the buffer 1.seen are one memory"):
        on_ranks(2, farspan.distribute, lambda: build(0))
    with pytest.raises(PlanError, match=r"the parameter 1.weight and the buffer 1.seen are one memory"):
        on_ranks(2, lambda model: farspan.distribute(model, tensor_parallel=2), lambda: build(1))


def _spectral() -> nn.Module:
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(0)
        return nn.Sequential(*(nn.utils.spectral_norm(nn.Linear(8, 8)) for _ in range(3)))


def test_a_spectral_norm_is_written_before_its_first_forward() -> None:
    """It has set the module's weight, a plain tensor, to the memory of the parameter, until a forward computes it."""

    def program(model: Any) -> Any:
        model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})
        model.eval()
        with torch.no_grad():
            return [model[0].weight.tolist(), model(ROWS).tolist()]

    wanted = program(_spectral())
    assert on_ranks(2, lambda model: program(farspan.distribute(model)), _spectral) == [wanted, wanted]

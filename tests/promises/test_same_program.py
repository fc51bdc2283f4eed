"""The program around the model stays the same: names, parameters, saving; plans and arguments."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.loop import X, mlp, on_ranks, steps, weights
from tests.support.models import MLP
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.errors import DivergenceError, PlanError

# Class, names, parameters.


def test_the_model_is_the_same_object_with_the_same_names() -> None:
    def program(model: nn.Module) -> None:
        names = [name for name, _ in model.named_parameters()]
        shapes = [p.shape for p in model.parameters()]
        parameters = list(model.parameters())
        assert farspan.distribute(model) is model
        assert type(model) is MLP
        assert [name for name, _ in model.named_parameters()] == names
        assert [p.shape for p in model.parameters()] == shapes
        assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
        assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf for p in model.parameters())
        assert all(p.grad is None for p in model.parameters())
        assert sum(p.numel() for p in model.parameters()) == sum(shape.numel() for shape in shapes)
        assert next(model.parameters()).device == torch.device("cpu")

    on_ranks(3, program)


def test_parameters_of_other_ranks_have_no_storage() -> None:
    def program(model: nn.Module) -> int:
        farspan.distribute(model)
        return sum(type(p) is nn.Parameter for p in model.parameters())

    assert sum(on_ranks(3, program)) == len(list(mlp().parameters()))


def test_a_state_dict_saved_on_one_rank_is_whole(tmp_path: Path) -> None:
    wanted = mlp()
    steps(wanted, torch.optim.SGD(wanted.parameters(), lr=0.1))
    models = [mlp() for _ in range(3)]

    def program(rank: int) -> None:
        model = farspan.distribute(models[rank])
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if rank == 2:
            torch.save(model.state_dict(), tmp_path / "model.pt")

    run_threads(3, program)
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(loaded) == list(wanted.state_dict())
    assert all(type(tensor) is torch.Tensor for tensor in loaded.values())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.state_dict().items())


def test_a_plain_checkpoint_loads_on_every_rank() -> None:
    other = mlp()
    steps(other, torch.optim.SGD(other.parameters(), lr=0.3))
    buffer = io.BytesIO()
    torch.save(other.state_dict(), buffer)

    def program(model: nn.Module) -> Any:
        farspan.distribute(model)
        buffer_of_rank = io.BytesIO(buffer.getvalue())
        assert (
            str(model.load_state_dict(torch.load(buffer_of_rank, weights_only=True)))
            == "<All keys matched successfully>"
        )
        with torch.no_grad():
            return weights(model), model(X).tolist()

    for got in on_ranks(3, program):
        assert got == (weights(other), other(X).tolist())


# Plans.


def test_a_plan_can_be_saved_edited_by_hand_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    on_ranks(2, lambda model: farspan.plan_of(farspan.distribute(model)).save(path))
    edited = path.read_text().replace('"head": 1', '"head": 0')
    assert edited != path.read_text()
    path.write_text(edited)

    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        distribute(model)
        return steps(model, torch.optim.SGD(model.parameters(), lr=0.1)), weights(model)

    wanted = program(mlp(), lambda model: model)
    plans = []
    for got in on_ranks(2, lambda model: program(model, lambda it: farspan.distribute(it, plan=path))):
        assert got == wanted
    on_ranks(2, lambda model: plans.append(farspan.plan_of(farspan.distribute(model, plan=str(path)))))
    assert plans[0].placement["head"] == 0 and "head" in str(plans[0])


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6])
def test_any_number_of_stages_on_two_ranks(num_stages: int) -> None:
    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        distribute(model)
        return steps(model, torch.optim.SGD(model.parameters(), lr=0.1)), weights(model)

    wanted = program(mlp(), lambda model: model)
    for got in on_ranks(2, lambda model: program(model, lambda it: farspan.distribute(it, stages=num_stages))):
        assert got == wanted


# Arguments.


def test_wrong_arguments_are_named() -> None:
    def program(model: nn.Module) -> None:
        with pytest.raises(PlanError, match=r"torch\.nn\.Module"):
            farspan.distribute(3)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="number of stages"):
            farspan.distribute(model, stages=0)
        with pytest.raises(PlanError, match="not been distributed"):
            farspan.plan_of(model)
        farspan.distribute(model)
        with pytest.raises(PlanError, match="already"):
            farspan.distribute(model)

    on_ranks(1, program)


# The data.


@pytest.mark.parametrize("is_whole", [True, False])
def test_ranks_that_feed_different_batches_are_named(is_whole: bool) -> None:
    first = nn.Embedding(9, 8) if is_whole else nn.Linear(8, 8)
    models = [nn.Sequential(copy.deepcopy(first), nn.Linear(8, 9), nn.Linear(9, 5)) for _ in range(3)]

    def program(rank: int) -> None:
        model = farspan.distribute(models[rank])
        generator = torch.Generator().manual_seed(int(rank == 2))
        x = torch.randint(9, (4,), generator=generator) if is_whole else torch.randn(4, 8, generator=generator)
        model(x).sum().backward()
        farspan.flush()

    with pytest.raises(DivergenceError, match=r"(?s)with the checksum .*, given to .*\n.*rank 2: "):
        run_threads(3, program)


def test_values_that_differ_in_their_last_bits_only_are_the_same_data() -> None:
    models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 9)) for _ in range(2)]
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))

    def program(rank: int) -> None:
        farspan.distribute(models[rank])(x * (1 + 2e-7 * rank)).sum().backward()
        farspan.flush()

    run_threads(2, program)

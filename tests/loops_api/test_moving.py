"""What trainers do to a model again and again without changing it costs nothing; conversions are not lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, mlp, on_ranks, same_everywhere, steps, weights
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.errors import RecordError
from farspan.execute.engine import Engine
from farspan.execute.process.world import current_engine
from farspan.execute.values import SharedValues
from farspan.record.parameters import program_device


def engine() -> Engine:
    found = current_engine()
    assert found is not None
    return found


def test_train_in_each_micro_batch_runs_nothing() -> None:
    def program(model: nn.Module) -> list[int]:
        farspan.distribute(model)
        counts: list[int] = []
        for mode in (True, True, False):
            model.train(mode)
            F.cross_entropy(model(X), Y).backward()
            counts.append(engine().num_flushes)
        return counts

    assert on_ranks(2, program) == [[0, 0, 1]] * 2  # what was recorded in train mode runs before eval mode begins


def test_setting_an_attribute_of_a_part_still_runs_what_was_recorded_with_the_old_one() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.factor = nn.Linear(12, 5), 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.factor

    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.Sequential(nn.Linear(12, 12), Scaled())

    def program(model: Any, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        distribute(model)
        losses = []
        for factor in (2, 3, 3, True):
            model[1].factor = factor
            losses.append(model(X).sum())
        return [loss.item() for loss in losses]

    wanted = program(build(), lambda model: model)
    assert on_ranks(2, lambda model: program(model, farspan.distribute), build) == [wanted] * 2


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cpu", 0)])
def test_moving_a_model_to_where_it_is_fetches_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    ask = SharedValues._ask
    monkeypatch.setattr(SharedValues, "_ask", lambda self, *args: asked.append(args) or ask(self, *args))

    def program(model: nn.Module) -> None:
        farspan.distribute(model)
        F.cross_entropy(model(X), Y).backward()
        assert model.to(device) is model
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    on_ranks(2, program)
    assert asked == []

    def and_read(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = steps(model, optimizer, 1)
        model.to(device)  # with gradients
        return losses, steps(model, optimizer, 1), weights(model)

    same_everywhere(and_read, 2)


@pytest.mark.parametrize("convert", [nn.Module.bfloat16, nn.Module.double, lambda model: model.to(torch.float16)])
def test_a_model_that_would_get_another_dtype_is_refused(convert: Callable[[nn.Module], Any]) -> None:
    def program(model: nn.Module) -> dict[str, Any]:
        farspan.distribute(model)
        with pytest.raises(RecordError, match="cannot become"):
            convert(model)
        return weights(model)

    assert on_ranks(2, program) == [weights(mlp())] * 2


class Halving(torch.optim.SGD):
    """Changes the parameters before it calls its closure, which torch's own do not."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=0.1)
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "num_flushes"), [(torch.optim.AdamW, 1), (torch.optim.SGD, 1), (Halving, 2)], ids=lambda item: str(item)
)
def test_micro_batches_before_a_closure_run_with_those_in_it(kind: Any, num_flushes: int) -> None:
    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        distribute(model)
        optimizer = kind(model.parameters(), lr=0.1)
        losses: list[Any] = []

        def closure() -> torch.Tensor:
            loss = F.cross_entropy(model(X * (1 + len(losses))), Y)
            loss.backward()
            losses.append(loss)
            return loss

        for _ in range(2):
            closure()
            closure()
            optimizer.step(closure)
            optimizer.zero_grad()
        found = current_engine()
        assert found is None or found.num_flushes == 2 * num_flushes
        return [loss.item() for loss in losses], weights(model)

    same_everywhere(program)


def test_memory_that_is_to_be_shared_is_shared_before() -> None:
    def program(rank: int) -> None:
        model = farspan.distribute(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), plan={"0": 0, "1": 1})
        with pytest.raises(RecordError) as caught:
            model.share_memory()
        assert caught.value.hint.startswith("call share_memory() before farspan.distribute, or share a copy: ")

    run_threads(2, program)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("cuda:1"),
        lambda model: model.cuda(1),
        lambda model: model.cuda(device=torch.device("cuda", 1)),
    ],
)
def test_a_call_that_changes_the_device_alone_says_where_the_program_has_a_model(
    move: Callable[[nn.Module], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stages stay on the CPU."""
    monkeypatch.setattr(program_device, "device_here", lambda named: named)

    def program(rank: int) -> tuple[set[str], set[str]]:
        model = farspan.distribute(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), plan={"0": 0, "1": 1})
        move(model)
        moved = {str(each.device) for each in model.parameters()}
        model.cpu()
        return moved, {str(each.device) for each in model.parameters()}

    assert run_threads(2, program) == [({"cuda:1"}, {"cpu"})] * 2

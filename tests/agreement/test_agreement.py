"""What the ranks agree on: whatever one of them does otherwise ends in an error that names it, before it does harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, mlp, on_ranks
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.errors import DivergenceError

Loop = Callable[[int, nn.Module, torch.optim.Optimizer, int], None]
"""What the last rank may do otherwise in its step: (rank, model, optimizer, number of the step)."""


class Scaled(nn.Module):
    """Uses two parameters of one shape outside every leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.p, self.q = nn.Parameter(torch.full((8,), 0.5)), nn.Parameter(torch.full((8,), 0.5))
        self.second = nn.Linear(8, 5)
        self.uses_q = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(y * (self.q if self.uses_q else self.p))


def scaled() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Scaled()


def train(rank: int, num_ranks: int, model: nn.Module, story: Callable[..., Any], where: str) -> None:
    """Six steps; in the fifth the last rank does as `story` says, at the place in the loop that `where` names."""
    farspan.distribute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def differs(place: str, number: int) -> bool:
        return number == 4 and rank == num_ranks - 1 and place == where and story(model, optimizer) is not None

    x = X.clone()
    for number in range(6):
        if not differs("zero_grad", number):
            optimizer.zero_grad()
        if differs("batch", number):
            x = story(model, optimizer)
        loss = F.cross_entropy(model(x), Y)
        if not differs("backward", number):
            loss.backward()
        differs("gradients", number)
        if not differs("step", number):
            optimizer.step()
        scheduler.step()
        differs("end", number)


def use_other_parameter(model: Any, _: Any) -> None:
    model.uses_q = True


def clear_gradient(model: Any, _: Any) -> None:
    next(iter(model.parameters())).grad = None


def change_rate(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.7


def evaluate(model: nn.Module, _: Any) -> None:
    model.eval()


def freeze(model: nn.Module, _: Any) -> None:
    next(iter(model.parameters())).requires_grad_(False)


def with_dropout() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 5))


def normalised() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))


def with_tensor_rate(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.3)


def leave_out(*_: Any) -> bool:
    return True


STORIES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], str, str]] = {
    "a step is left out": (mlp, leave_out, "step", r"step\(\) of SGD at .*test_agreement.py"),
    "gradients are not cleared": (mlp, leave_out, "zero_grad", r"\.grad = None, at "),
    "one gradient is cleared": (mlp, clear_gradient, "gradients", r"\.grad = (None|\.\.\.), at "),
    "a backward is left out": (mlp, leave_out, "backward", r"backward\(\) at "),
    "another learning rate": (mlp, change_rate, "gradients", r"param_groups\[0\]\['lr'\] is 0\.7 in step\(\) of SGD"),
    "a learning rate in a tensor": (mlp, with_tensor_rate, "gradients", r"\['lr'\] is tensor\(0\.3.*in step\(\)"),
    "another parameter": (scaled, use_other_parameter, "zero_grad", "argument 2 of .*mul at .* is parameter q"),
    "another batch in the fifth step": (
        mlp,
        lambda *_: X.roll(1, 0),
        "batch",
        r"checksum .*, given to .* as argument 1",
    ),
    "another layout": (mlp, lambda *_: X.t().contiguous().t(), "batch", r"float32\[6, 12\] of strides \[1, 6\]"),
    "evaluation": (normalised, evaluate, "zero_grad", "evaluation"),
    "no dropout": (with_dropout, evaluate, "zero_grad", "evaluation"),
    "a frozen parameter": (mlp, freeze, "zero_grad", "frozen|does not require|parameter"),
}


@pytest.mark.parametrize(("name", "num_ranks"), [*((name, 3) for name in STORIES), ("a step is left out", 2)])
def test_what_one_rank_does_otherwise_is_named(name: str, num_ranks: int) -> None:
    build, story, where, words = STORIES[name]
    models = [build() for _ in range(num_ranks)]
    with pytest.raises(DivergenceError, match=rf"(?s)programs differ.*{words}") as raised:
        run_threads(num_ranks, lambda rank: train(rank, num_ranks, models[rank], story, where))
    assert len(str(raised.value).splitlines()) <= 8


def test_a_last_step_that_one_rank_leaves_out_is_named() -> None:
    models = [mlp() for _ in range(2)]

    def program(rank: int) -> None:
        model = farspan.distribute(models[rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        loss.item()
        if rank == 0:
            optimizer.zero_grad()

    with pytest.raises(DivergenceError, match=r"(?s)rank 0: .*\.grad = None.*rank 1: the end of the program"):
        run_threads(2, program)


def test_loading_other_weights_on_one_rank_is_named() -> None:
    states = [mlp().state_dict(), {name: item + 1 for name, item in mlp().state_dict().items()}]

    models = [mlp() for _ in range(2)]

    def program(rank: int) -> None:
        model = farspan.distribute(models[rank])
        model.load_state_dict(states[rank])
        F.cross_entropy(model(X), Y).backward()
        farspan.flush()

    with pytest.raises(DivergenceError, match="is loaded, with the checksum"):
        run_threads(2, program)


def test_optimizers_of_other_parameters_are_named() -> None:
    models = [mlp() for _ in range(2)]

    def program(rank: int) -> None:
        model = farspan.distribute(models[rank])
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters if rank == 0 else parameters[1:], lr=0.1)
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()

    with pytest.raises(DivergenceError, match="of other parameters"):
        run_threads(2, program)


def test_clearing_gradients_in_another_order_is_the_same() -> None:
    def program(model: nn.Module) -> list[float]:
        model = farspan.distribute(model)
        losses: list[float] = []
        for _ in range(3):
            for parameter in set(model.parameters()):
                parameter.grad = None
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            losses.append(loss.item())
        return losses

    assert len({tuple(losses) for losses in on_ranks(3, program)}) == 1

"""A process that is alone: its program is the plain one, and nothing of torch is touched for it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, steps, weights
from tests.support.models import MLP
from tests.support.ranks import run_processes
from torch import nn

import farspan
from farspan.call.draws.scope import active
from farspan.errors import PlanError
from farspan.record.tensor import LazyTensor


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FARSPAN_RECORD", "0")
    active.recorder = None  # a test before may have had one in this thread
    to = torch.Tensor.to
    yield
    torch.Tensor.to = to  # type: ignore[method-assign]


def built(model: Any = MLP) -> nn.Module:
    torch.manual_seed(1)
    return model()


def test_a_program_of_one_process_computes_at_once() -> None:
    model = farspan.distribute(built())
    loss = F.cross_entropy(model(X), Y)
    assert type(loss) is torch.Tensor
    assert loss.grad_fn is not None
    loss.backward()
    assert all(item.grad is not None for item in model.parameters())
    assert active.recorder is None


def test_same_losses_weights_and_random_numbers_as_without() -> None:
    def program(distribute: Any) -> tuple[Any, ...]:
        model = distribute(built(lambda: nn.Sequential(MLP(), nn.Dropout(0.5), nn.Linear(5, 5))))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = steps(model, optimizer)
        return losses, weights(model), optimizer.state_dict()["state"][0]["exp_avg"].tolist(), torch.rand(1).item()

    assert program(farspan.distribute) == program(lambda model: model)


def test_places_in_the_program_are_those_of_the_one_process() -> None:
    model = farspan.distribute(built())
    with farspan.on("rank:0"):
        y = model(X.to("rank:0", torch.float64).to("rank:0/cpu").to(device="rank:0", dtype=torch.float32))
    assert torch.equal(y, model(X))
    assert X.to("rank:0") is X
    with pytest.raises(PlanError, match="there is no rank 1"):
        X.to("rank:1")
    assert X.to(torch.float64).dtype == torch.float64
    with pytest.raises(RuntimeError):
        X.to("nowhere")


def test_the_calls_of_the_package_work() -> None:
    model = farspan.distribute(built())
    assert farspan.plan_of(model).stages == ("rank:0",)
    batch = (X, Y)
    assert farspan.from_rank(0, batch) is batch
    farspan.flush()
    assert farspan.last_step() is None
    assert farspan.rank() == 0
    with pytest.raises(PlanError, match="has been distributed already"):
        farspan.distribute(model)
    assert weights(copy.deepcopy(model)) == weights(model)


@pytest.mark.parametrize("asked", [{"seed": 0}, {"remat": True}, {"schedule": "gpipe"}, {"plan": {"*": "rank:0"}}])
def test_what_the_plain_program_does_not_have_is_recorded(asked: dict[str, Any]) -> None:
    model = farspan.distribute(built(), **asked)
    assert type(model(X)) is LazyTensor


def test_a_model_that_meets_a_recorded_one_is_recorded_too() -> None:
    first = farspan.distribute(built(), remat=True)
    second = farspan.distribute(built())
    assert type(first(X)) is LazyTensor
    assert type(second(X)) is LazyTensor


def test_a_model_that_was_left_alone_trains_beside_one_that_is_recorded() -> None:
    def program(distribute: Any, **asked: Any) -> Any:
        head = distribute(built(lambda: nn.Linear(5, 5)))
        body = distribute(built(), **asked)
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(head(body(X)), Y).backward()
            optimizer.step()
        return weights(body), weights(head)

    assert program(farspan.distribute, schedule="1f1b") == program(lambda model, **_: model)


def test_what_cannot_be_distributed_is_refused_here_too() -> None:
    with pytest.raises(PlanError, match="has no shape yet"):
        farspan.distribute(nn.LazyLinear(3))


def test_the_setting_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSPAN_RECORD", "1")
    assert type(farspan.distribute(built())(X)) is LazyTensor


def test_a_report_is_asked_of_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSPAN_REPORT", "step.html")
    assert type(farspan.distribute(built())(X)) is LazyTensor


FIRST_ALONE = """
import torch
from torch import nn
import farspan

x = torch.ones(2, 3)
first = farspan.distribute(nn.Linear(3, 3))
assert torch.equal(first(x.to("rank:0/cpu")), first(x))
second = farspan.distribute(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), plan={"": "rank:0/cpu"})
y = second(x)
print(type(y).__qualname__, type(y.to("rank:0/cpu")).__qualname__, torch.equal(y.to("rank:0/cpu").read(), y.read()))
"""


def test_a_model_that_is_recorded_after_one_that_is_not_knows_places(tmp_path: Path) -> None:
    """What is recorded is loaded only then: torch's own functions are known by what they were before."""
    script = tmp_path / "script.py"
    script.write_text(FIRST_ALONE)
    (finished,) = run_processes(1, script, environment={"FARSPAN_RECORD": "0"})
    assert finished.stdout.split() == ["LazyTensor", "LazyTensor", "True"], finished.stderr

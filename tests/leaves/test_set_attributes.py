"""What the program sets on modules decides what their next calls do: other shapes, other parameters, no gradient."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.plainly import X, assert_same_as_plainly, train
from torch import Tensor, nn


class Part(nn.Module):
    """Does as its attributes say."""

    base = 1

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.way = "one"
        self.power: Callable[[Tensor], Tensor] = torch.tanh
        self.config = SimpleNamespace(is_detached=False)
        self.scale = 1.0
        self.shift = torch.zeros(8)
        self.cuts = [8]

    def forward(self, x: Tensor) -> Tensor:
        x = getattr(self, self.way)(x) if self.way != "none" else x
        if self.config.is_detached:
            x = x.detach()
        if hasattr(self, "extra"):
            return x[:, :6]
        return torch.cat([self.power(x) * self.scale + self.shift] * self.base, 1)[:, : self.cuts[0]]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = Part(), Part()
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.first(x))
        return self.head(nn.functional.pad(y, (0, 8 - y.shape[1])))


def set_forward(part: Any) -> None:
    linear = part.other
    part.forward = lambda x: linear(x)[:, :5]


def unset(part: Any) -> None:
    part.extra = True
    del part.extra


STORIES: dict[str, Callable[[Any], object]] = {
    "another parameter is used": lambda part: setattr(part, "way", "other"),
    "no parameter is used": lambda part: setattr(part, "way", "none"),
    "no gradient flows": lambda part: setattr(part, "config", SimpleNamespace(is_detached=True)),
    "an object that it holds changes": lambda part: setattr(part.config, "is_detached", True),
    "another shape": lambda part: setattr(part, "cuts", [4]),
    "a list that it holds changes": lambda part: part.cuts.__setitem__(0, 3),
    "another function": lambda part: setattr(part, "power", lambda x: x.square().sum(1, keepdim=True)),
    "a number": lambda part: setattr(part, "scale", 0.5),
    "a tensor": lambda part: setattr(part, "shift", torch.ones(1, 8)),
    "another forward": set_forward,
    "what its class had": lambda part: setattr(part, "base", 2),
    "something new": lambda part: setattr(part, "extra", True),
    "something that is gone again": unset,
    "directly": lambda part: vars(part).update(way="none"),
    "what it had": lambda part: setattr(part, "way", "one"),
    "a part of it": lambda part: setattr(part, "one", part.other),
    "what a part of it has": lambda part: setattr(part.one, "forward", lambda x: x[:, :6].repeat(1, 2)[:, :8]),
}


@pytest.mark.parametrize("name", STORIES)
def test_what_the_program_sets_on_a_module_holds_from_its_next_call(name: str) -> None:
    def program(model: Any) -> Any:
        found = [train(model, X)]
        STORIES[name](model.middle)
        found.append(train(model, X))
        with torch.no_grad():
            out = model(X)
        return found, list(out.shape), out.tolist()

    places = {"first": "rank:0", "middle": "rank:1", "head": "rank:0"}
    assert_same_as_plainly(Model, program, 2, plan=places)


def test_what_is_deleted_again_is_gone() -> None:
    def program(model: Any) -> Any:
        model.middle.extra = True
        found = [train(model, X)]
        del model.middle.extra
        return [*found, train(model, X)]

    assert_same_as_plainly(Model, program, 2)


def test_what_comes_and_goes_is_predicted_once_for_each_value() -> None:
    def program(model: Any) -> Any:
        found: list[Any] = []
        for number in range(6):
            model.first.way, model.middle.scale = ("one", "other", "none")[number % 3], 1.0 + number % 2
            found.append(train(model, X))
        return found

    assert_same_as_plainly(Model, program, 2)

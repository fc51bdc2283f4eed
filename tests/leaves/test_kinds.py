"""Modules whose code or tensors are of an unusual kind: they work to the last bit, or are refused at the place."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.support.plainly import X, assert_same_as_plainly, train
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import PlanError, RecordError


def scripted(what: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to give TorchScript up
        return torch.jit.script(what)


def traced(what: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(what, X)


@scripted
def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class ScriptedFunction(nn.Module):
    """Between modules, and so on recorded tensors, which TorchScript cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(swish(self.middle(swish(self.first(x)))))


class Mlp(ScriptedFunction):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Generating(Mlp):
    def hidden(self, x: Tensor) -> Iterator[Tensor]:
        for module in (self.first, self.middle):
            x = torch.tanh(module(x))
            yield x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum(self.hidden(x)))


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    hidden: Tensor
    parts: list[Any]


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Outcome:
        hidden = self.linear(x)
        return Outcome(hidden, [hidden.mean(), {"twice": 2 * hidden}])


class Unwrapping(nn.Module):
    """Its part returns a frozen dataclass, and is known by another name through `__getattr__`."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.middle, self.head = Structured(), nn.Linear(8, 8), nn.Linear(8, 5)

    def __getattr__(self, name: str) -> Any:
        return self.part if name == "encoder" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        outcome = self.encoder(x)
        return self.head(self.middle(outcome.hidden) * outcome.parts[0] + outcome.parts[1]["twice"])


class NestedInside(Mlp):
    """Texts of several lengths as one jagged tensor, which never leaves the forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        nested = torch.nested.as_nested_tensor([x[:1], x[1:3], x[3:]], layout=torch.jagged)
        return self.head(torch.tanh(self.middle(nested)).values())


class ScriptedActivation(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.activation = scripted(nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.middle(self.first(x))))


def materialised() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh(), nn.Linear(8, 8), nn.LazyLinear(5))
    model(X)
    return model


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("build", [ScriptedFunction, Generating, Unwrapping, NestedInside, materialised])
def test_works(build: Callable[[], nn.Module], num_ranks: int) -> None:
    train(build())  # TorchScript rewrites a function when it has run, and on some machines it rounds otherwise then
    assert_same_as_plainly(build, train, num_ranks)


def test_scripted_module_without_weights_works() -> None:
    torch.manual_seed(0)
    wanted = train(ScriptedActivation())
    torch.manual_seed(0)
    model = ScriptedActivation()
    assert run_threads(1, lambda rank: train(farspan.distribute(model))) == [wanted]


def scripted_part() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), scripted(Mlp()))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (scripted_part, r"the module '1' is scripted or traced"),
    (lambda: scripted(Mlp()), "the model is scripted or traced"),
    (lambda: traced(Mlp()), "the model is scripted or traced"),
    (lambda: nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(5)), r"'1\.weight' has no shape yet"),
    (lambda: nn.Sequential(nn.Linear(8, 8), nn.LazyBatchNorm1d(affine=False)), r"'1\.running_mean' has no shape yet"),
]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("build", "words"), REFUSED)
def test_model_is_refused_where_it_is_distributed(build: Callable[[], Any], words: str, num_ranks: int) -> None:
    models = [build() for _ in range(num_ranks)]
    with pytest.raises(PlanError, match=words):
        run_threads(num_ranks, lambda rank: farspan.distribute(models[rank]))


class Nesting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor([x[:1], x[1:3]], layout=torch.jagged)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nested_tensor_given_to_the_model_is_refused(num_ranks: int) -> None:
    models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)) for _ in range(num_ranks)]
    nested = torch.nested.nested_tensor([X[:1], X[1:3]], layout=torch.jagged)
    with pytest.raises(RecordError, match="a nested tensor cannot be given"):
        run_threads(num_ranks, lambda rank: farspan.distribute(models[rank])(nested))


def test_nested_tensor_from_a_module_is_refused() -> None:
    models = [nn.Sequential(Nesting(), nn.Linear(8, 5)) for _ in range(2)]
    plan = {"0": "rank:0", "1": "rank:1"}
    with pytest.raises(RecordError, match="nor come out of one"):
        run_threads(2, lambda rank: farspan.distribute(models[rank], plan=plan)(X))

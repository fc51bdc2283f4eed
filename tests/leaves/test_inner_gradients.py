"""Modules that differentiate inside themselves: while their units are measured, and under the plan that is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.plainly import assert_same_as_plainly, train
from tests.support.ranks import run_threads
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vjp, vmap

import farspan
from farspan.errors import RecordError


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x))).sum(-1)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = Energy()


class Hamiltonian(Part):
    """The flow of a learned energy, by autograd.grad in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            gradient = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]
        position, momentum = gradient.chunk(2, -1)
        return torch.cat([momentum, -position], -1)


class PerSample(Part):
    """Each sample is weighted by the norm of its own gradient of the parameters."""

    def forward(self, x: Tensor) -> Tensor:
        def energy_of(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
            return functional_call(self.energy, parameters, (sample,)).sum()

        gradients = vmap(grad(energy_of), in_dims=(None, 0))(dict(self.energy.named_parameters()), x)
        norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients.values()]).sum(0)
        return x * torch.exp(-0.1 * norms)[:, None]


class Score(Part):
    def forward(self, x: Tensor) -> Tensor:
        return x + vmap(grad(self.energy))(x) + vjp(self.energy, x)[1](torch.ones(len(x)))[0]


class Jacobian(Part):
    def forward(self, x: Tensor) -> Tensor:
        return x + vmap(jacrev(self.energy.inner))(x).sum(1)


class InnerLoop(Part):
    """Two steps of gradient descent inside, in the manner of MAML."""

    def forward(self, x: Tensor) -> Tensor:
        weights: dict[str, Tensor] = dict(self.energy.named_parameters())
        for _ in range(2):
            loss = functional_call(self.energy, weights, (x,)).square().mean()
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {
                name: weight - 0.1 * gradient
                for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
            }
        return x + functional_call(self.energy, weights, (x,))[:, None]


class Model(nn.Module):
    def __init__(self, part: type[Part]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.part = part()
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(torch.tanh(self.first(x))))


PARTS: list[Any] = [Hamiltonian, PerSample, Score, Jacobian, InnerLoop]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("part", PARTS)
def test_same_while_measured_and_after(part: type[Part], num_ranks: int) -> None:
    assert_same_as_plainly(lambda: Model(part), train, num_ranks)


def test_same_while_a_state_dictionary_is_kept() -> None:
    """Its memory is looked for among all arguments; those of torch.func have none of their own."""

    def program(model: Any) -> Any:
        kept = model.state_dict()
        torch.manual_seed(1)
        other = Model(Score)  # is not distributed
        return train(other), train(model), {name: tensor.tolist() for name, tensor in kept.items()}

    assert_same_as_plainly(lambda: Model(Score), program, 1)


class Ensemble(nn.Module):
    """A container of which parameters, and nothing that is recorded, go to torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(0.1 * torch.randn(3, 8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        def member(first: Tensor, second: Tensor) -> Tensor:
            return torch.tanh(x @ first) @ second

        return self.head(vmap(member)(self.first, self.second).mean(0))


class Slope(Ensemble):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ grad(lambda weights: (x @ weights).square().mean())(self.second).sum(0))


@pytest.mark.parametrize("build", [Ensemble, Slope])
def test_parameters_alone_may_go_to_torch_func(build: type[nn.Module]) -> None:
    assert_same_as_plainly(build, train, 2, plan={"first": "rank:0", "second": "rank:1", "head": "rank:0"})


class Normed(nn.Module):
    """A container that transforms what its parts give, and cannot become one unit: a part has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(vmap(torch.tanh)(self.first(x)))


class NormedHessian(Normed):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(vmap(hessian(lambda sample: self.head(sample).square().sum()))(self.first(x)).sum(1))


@pytest.mark.parametrize("build", [Normed, NormedHessian])
def test_refusal_in_a_container_names_the_transformation(build: Any) -> None:
    torch.manual_seed(0)
    models = [build() for _ in range(2)]
    with pytest.raises(RecordError, match=r"torch\.func"):
        run_threads(2, lambda rank: train(farspan.distribute(models[rank], plan={"first": "rank:0", "head": "rank:1"})))

"""`torch.autograd.grad(..., create_graph=True)` in the loop: gradients that the program differentiates again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import on_ranks
from tests.support.ranks import differences
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call

import farspan
from farspan.errors import RecordError

DTYPE = torch.float64
BATCHES = torch.randn(3, 2, 8, 6, dtype=DTYPE, generator=torch.Generator().manual_seed(1))
PROGRAM = Path(__file__).with_name("penalty_with_dropout.py")


class Residual(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Critic(nn.Module):
    """One weight is used on the first stage and on the last; the derivative of the norm does not depend on its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, norms = nn.Linear(6, 12), (nn.LayerNorm(12), nn.GroupNorm(3, 12))
        self.blocks = nn.ModuleList(map(Residual, norms))
        self.back, self.head = nn.Linear(12, 6), nn.Linear(6, 1)
        self.norm, self.tied = nn.LayerNorm(12), nn.Linear(6, 12)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.first(x)))
        for block in self.blocks:
            h = 0.9 * block(h) + 0.1 * h
        return self.head(torch.tanh(self.back(h + self.tied(x)))).squeeze(-1)


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Critic().to(DTYPE)


def penalty(model: Any, x: Tensor) -> Tensor:
    """That of WGAN-GP."""
    mean, x = model(x).mean(), x.clone().requires_grad_()
    (slope,) = grad(model(x).sum(), x, create_graph=True)
    return mean + 10 * (slope.norm(2, dim=1) - 1).square().mean()


def equation(model: Any, x: Tensor) -> Tensor:
    """Second derivatives by inputs that are joined outside of the model."""
    parts = [part.clone().requires_grad_() for part in x.split(1, dim=1)]
    u = model(torch.cat(parts, 1))
    u_x, u_t = grad(u.sum(), parts[:2], create_graph=True)
    (u_xx,) = grad(u_x.sum(), parts[0], create_graph=True)
    return (u_t + u[:, None] * u_x - 0.1 * u_xx).square().mean()


def learned_in_two_steps(model: Any, x: Tensor) -> Tensor:
    """MAML: the loss is that of weights after two steps, through both of which gradient flows."""
    y, weights = x.sum(1).sin(), dict(model.named_parameters())
    for _ in range(2):
        loss = F.mse_loss(functional_call(model, weights, (x[:4],)), y[:4])
        gradients = grad(loss, list(weights.values()), create_graph=True)
        weights = {name: old - 0.1 * new for (name, old), new in zip(weights.items(), gradients, strict=True)}
    return F.mse_loss(functional_call(model, weights, (x[4:],)), y[4:])


def curvature(model: Any, x: Tensor) -> Tensor:
    """A product with the Hessian, without history, and a term of the gradients' norm."""
    loss, weights = model(x).square().mean(), list(model.parameters())
    gradients = grad(loss, weights, create_graph=True)
    products = grad(gradients, weights, [torch.ones_like(item) for item in weights], retain_graph=True)
    norm = sum((item.square().sum() for item in gradients), torch.zeros((), dtype=DTYPE))
    return loss + 0.1 * norm + 0.01 * sum(((g * p.detach()).sum() for g, p in zip(gradients, products, strict=True)))


def inside(model: Any, x: Tensor) -> Tensor:
    """By what a part of the model has given; a second gradient for the same; one that nothing depends on."""
    h = torch.tanh(model.first(x))
    spare = torch.ones(3, dtype=DTYPE, requires_grad=True)
    energy = model.back(h).square().sum() + F.linear(h, model.back.weight.detach()).sin().sum()
    force, none = grad(energy, [h, spare], create_graph=True, allow_unused=True)
    (again,) = grad(energy.sin(), h, create_graph=True)
    assert none is None
    return (force * again).sum() + model(x).mean()


def forward_derivative(model: Any, x: Tensor) -> Tensor:
    """By two backwards, of which the second goes to the gradient that the first was given."""
    x, given = x.clone().requires_grad_(), torch.ones(8, dtype=DTYPE, requires_grad=True)
    (slope,) = grad(model(x), x, given, create_graph=True)
    (product,) = grad(slope, given, torch.ones(8, 6, dtype=DTYPE), create_graph=True)
    return product.square().mean()


def hessian(model: Any, x: Tensor) -> Tensor:
    found = torch.autograd.functional.hessian(lambda one: model(one[None]).sum(), x[0], create_graph=True)
    assert isinstance(found, Tensor)
    return found.square().sum() + model(x).mean()


def written_in_place(model: Any, x: Tensor) -> Tensor:
    """What is written over is read once more by the derivative, on the same stage and on another."""
    x = x.new_ones(8, 12) * x.clone().requires_grad_()[:, :1]
    h = 2 * F.leaky_relu(model.norm(x), 0.1, inplace=True)
    y = torch.tanh(h)
    h.mul_(0.5)
    h[:, :2].add_(1.0)
    loss = model.back(h).square().mean()
    loss += y.square().mean()
    loss /= 2
    gradients = grad(loss, [x, model.norm.weight, model.back.weight], create_graph=True)
    for gradient in gradients:
        loss += gradient.square().sum()
    return loss + model(x[:, :6]).mean()


class Rectified(nn.Module):
    """Writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.linear = nn.ELU(inplace=True), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.relu(x)) + x


def again_and_again(model: Any, x: Tensor) -> Tensor:
    """One module is called several times on one stage, so that its parameters are behind what it is given."""
    h = torch.cat((x, x.sin()), 1)
    for _ in range(3):
        h = torch.tanh(model.norm(h))
    weights = [model.norm.weight, model.norm.bias]
    slopes = grad((h * x[:, :1]).square().mean(), weights, create_graph=True)
    slopes = grad(sum((slope.square().sum() for slope in slopes), h.mean()), weights, create_graph=True)
    return sum((slope.square().sum() for slope in slopes), model(x).mean())


def train(model: Any, loss_of: Callable[[Any, Tensor], Tensor]) -> tuple[list[float], dict[str, Tensor | None]]:
    """Returns the losses; weights and gradients after three steps of two micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for batches in BATCHES:
        optimizer.zero_grad()
        for x in batches:
            loss = loss_of(model, x)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found: dict[str, Any] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        values = None if parameter.grad is None else parameter.grad.tolist()
        found[f"gradient of {name}"] = None if values is None else torch.tensor(values, dtype=DTYPE)
    return losses, found


@pytest.mark.parametrize(
    "loss_of",
    [
        penalty,
        equation,
        learned_in_two_steps,
        curvature,
        inside,
        forward_derivative,
        hessian,
        written_in_place,
        again_and_again,
    ],
)
def test_the_same_numbers_as_in_one_process_but_for_rounding(loss_of: Callable[[Any, Tensor], Tensor]) -> None:
    wanted_losses, wanted = train(build(), loss_of)
    for losses, found in on_ranks(2, lambda model: train(farspan.distribute(model), loss_of), build):
        torch.testing.assert_close(losses, wanted_losses, rtol=1e-12, atol=1e-12)
        assert found.keys() == wanted.keys()
        for name, item in wanted.items():
            assert (found[name] is None) == (item is None), name
            if item is not None:
                torch.testing.assert_close(found[name], item, rtol=1e-10, atol=1e-10)


def test_a_module_that_writes_into_what_it_is_given() -> None:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            return nn.Sequential(nn.Linear(6, 6), Rectified(), Rectified(), nn.Linear(6, 1)).to(DTYPE)

    wanted_losses, wanted = train(build(), penalty)
    for losses, found in on_ranks(2, lambda model: train(farspan.distribute(model), penalty), build):
        torch.testing.assert_close(losses, wanted_losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["dropout", "dropout_after_reads"])
def test_what_draws_draws_the_same_again(name: str) -> None:
    for found in differences(str(PROGRAM), name, 2):
        assert set(found.values()) == {""}


def test_what_writes_into_its_module_is_a_named_error() -> None:
    """As torch's older spectral norm does, which sets the weight at each call."""

    def program(model: Any) -> Any:
        model = nn.Sequential(nn.Linear(6, 6), nn.utils.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 1))
        x = BATCHES[0, 0].clone().requires_grad_()
        return grad(farspan.distribute(model.to(DTYPE))(x).sum(), x, create_graph=True)

    with pytest.raises(RecordError, match="which writes into objects it is given, or into its module"):
        on_ranks(2, program, build)


def test_a_step_between_does_not_go_unseen() -> None:
    """Torch says that a weight has been changed in place."""

    def program(model: Any) -> None:
        x = BATCHES[0, 0].clone().requires_grad_()
        kept = model(x).sum()
        model(x).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        grad(kept, x, create_graph=True)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        program(build())
    with pytest.raises(RecordError, match="create_graph=True cannot be recorded here"):
        on_ranks(2, lambda model: program(farspan.distribute(model)), build)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.a(x)), torch.tanh(self.b(y))


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.last = Pair(), nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(self.pair(x, y)[1])


def test_what_is_requested_may_be_behind_another_output() -> None:
    def program(model: Any) -> list[Any]:
        x, y = (batch.clone().requires_grad_() for batch in BATCHES[0])
        none, slope = grad(model(x, y).sum(), [x, y], create_graph=True, allow_unused=True)
        (nothing,) = grad(model(x, y).sum(), [x], create_graph=True, allow_unused=True)
        total = model(x, y).sum() + model(y, y).square().sum()
        with torch.no_grad():
            (force,) = grad(total, y, create_graph=True)
        assert none is None and nothing is None and force.requires_grad
        (slope.square().sum() + force.sum()).backward()
        return [None if item.grad is None else item.grad.tolist() for item in model.parameters()]

    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            return Pairs().to(DTYPE)

    wanted = program(build())
    for found in on_ranks(2, lambda model: program(farspan.distribute(model)), build):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


class TwoHeads(nn.Module):
    """Gives two results, of which the loss needs one, or uses a weight without gradient."""

    def __init__(self, *, is_detached: bool) -> None:
        super().__init__()
        self.trunk, self.head, self.is_detached = nn.Linear(6, 6), nn.Linear(6, 6), is_detached

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return (F.linear(h, self.head.weight.detach()), h) if self.is_detached else (h, self.head(h))


class Force(nn.Module):
    """A derivative that does not depend on the norm's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x if x.requires_grad else x.clone().requires_grad_()
        return grad((self.norm(x) * torch.arange(6)).sum(), x, create_graph=True)


class CalledTwice(nn.Module):
    def __init__(self, heads: nn.Module) -> None:
        super().__init__()
        self.heads, self.between, self.last = heads, nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.heads(self.between(self.heads(x)[0]))[0])


@pytest.mark.parametrize("kind", [partial(TwoHeads, is_detached=False), partial(TwoHeads, is_detached=True), Force])
def test_a_parameter_without_gradient_in_a_module_that_is_called_twice(kind: Callable[[], nn.Module]) -> None:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            return CalledTwice(kind()).to(DTYPE)

    def program(model: Any) -> list[Any]:
        model(BATCHES[0, 0]).sum().backward()
        return [None if item.grad is None else item.grad.tolist() for item in model.parameters()]

    wanted = program(build())
    assert None in wanted
    plan = {"heads": "rank:0", "between": "rank:1", "last": "rank:1"}
    assert on_ranks(2, lambda model: program(farspan.distribute(model, plan=plan)), build) == [wanted] * 2


class Exact(nn.Module):
    """Computes in full precision inside of a region of a lower one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(self.linear(x))


@pytest.mark.parametrize("is_forward_exact", [True, False])
def test_the_backward_of_a_derivative_is_under_the_autocast_of_its_own_line(*, is_forward_exact: bool) -> None:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            return nn.Sequential(Exact(), Exact(), Exact()) if is_forward_exact else nn.Sequential(Pair(), Exact())

    def program(model: Any) -> Any:
        x = BATCHES[0, 0].float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_forward_exact):
            loss = (model(x) if is_forward_exact else model[1](model[0](x, x)[0])).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=not is_forward_exact):
            (slope,) = grad(loss, x, create_graph=True)
        slope.square().sum().backward()
        return slope.tolist(), [None if item.grad is None else item.grad.tolist() for item in model.parameters()]

    wanted = program(build())
    for found in on_ranks(2, lambda model: program(farspan.distribute(model)), build):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)

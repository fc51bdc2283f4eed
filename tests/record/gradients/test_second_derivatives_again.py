"""Gradients with a history of what has run already, and through modules that write into their buffers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import on_ranks
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm

import farspan
from farspan.errors import RecordError
from farspan.graph import EVERYWHERE, Call, Meta, Value
from farspan.record.derivatives.recorded_again import _is_recorded_apart
from farspan.record.tensor import LazyTensor

DTYPE = torch.float64
BATCHES = torch.randn(3, 2, 8, 6, dtype=DTYPE, generator=torch.Generator().manual_seed(1))


class Centred(nn.Module):
    """Its result depends on the buffer that it writes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor, self.table = nn.Linear(12, 12), [1.0], torch.ones(12, dtype=DTYPE)
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) * self.factor[0] * self.table - self.mean
        with torch.no_grad():
            self.mean.mul_(0.5).add_(y.mean(0))
        return y


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.LeakyReLU(0.2, inplace=True)
        self.up, self.centred = spectral_norm(nn.Linear(12, 12)), Centred()
        self.head = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.SiLU(), nn.Linear(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.first(x)))
        return self.head(self.centred(torch.tanh(self.up(h)))).squeeze(-1)


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Critic().to(DTYPE)


Loss = Callable[[Any, Tensor, list[float]], Tensor]


def penalty(model: Any, x: Tensor, read: list[float]) -> Tensor:
    """That of WGAN-GP, nothing of which is read."""
    mean, x = model(x).mean(), x.clone().requires_grad_()
    (slope,) = grad(model(x).sum(), x, create_graph=True)
    return mean + 10 * (slope.norm(2, dim=1) - 1).square().mean()


def penalty_after_reads(model: Any, x: Tensor, read: list[float]) -> Tensor:
    """That of R1; the program prints, and decides by what it has computed."""
    x = x.clone().requires_grad_()
    scores = model(x)
    loss = F.softplus(-scores).mean()
    read.append(loss.item())
    if loss > 0.01:
        (slope,) = grad(scores.sum(), x, create_graph=True)
        read.append(slope.norm().item())
        (curve,) = grad(slope[:, 0].sum(), x, create_graph=True)
        read.append(curve.norm().item())
        loss = loss + 5 * slope.square().sum(1).mean() + curve.square().sum()
    return loss


def learned_after_reads(model: Any, x: Tensor, read: list[float]) -> Tensor:
    """MAML."""
    y, weights = x.sum(1).sin(), dict(model.named_parameters())
    for _ in range(2):
        loss = F.mse_loss(functional_call(model, weights, (x[:4],)), y[:4])
        read.append(loss.item())
        gradients = grad(loss, list(weights.values()), create_graph=True)
        weights = {name: old - 0.1 * new for (name, old), new in zip(weights.items(), gradients, strict=True)}
    return F.mse_loss(functional_call(model, weights, (x[4:],)), y[4:])


def evaluated_between(model: Any, x: Tensor, read: list[float]) -> Tensor:
    """A derivative of a training call after an evaluation, and one of a call in eval mode."""
    x = x.clone().requires_grad_()
    scores = model(x)
    model.eval()
    with torch.no_grad():
        read.append(model(x + 1).mean().item())
    model.train()
    (slope,) = grad(scores.sum(), x, create_graph=True)
    model.eval()
    fixed = model(x)
    read.append(fixed.mean().item())
    (flat,) = grad(fixed.square().sum(), x, create_graph=True)
    model.train()
    return (slope * flat).sum() + scores.mean()


def what_gets_no_gradient(model: Any, x: Tensor, read: list[float]) -> Tensor:
    """A mask, an index and a teacher's scores have to be computed again, too, and what is written in place."""
    x = x.clone().requires_grad_()
    h = torch.tanh(model.first(x))
    mask, chosen = (h.detach() > 0).to(DTYPE), h.detach().abs().topk(5, 1).indices
    y = model.centred(model.up(h * mask + 1)) + 0
    y.add_(1.0)
    y[:, :2].mul_(2.0)
    with torch.no_grad():
        teacher = torch.tanh(model.first(x * 2)).sum(1)
    loss = F.mse_loss(y.gather(1, chosen).sum(1), teacher)
    loss += 1
    del h, mask, chosen, y, teacher
    read.append(loss.item())
    (slope,) = grad(loss, x, create_graph=True)
    return loss + slope.square().sum() + model(x).mean()


def train(model: Any, loss_of: Loss) -> list[Any]:
    optimizer, read = torch.optim.SGD(model.parameters(), lr=1e-2), list[float]()
    for batches in BATCHES:
        optimizer.zero_grad()
        for x in batches:
            loss = loss_of(model, x, read)
            loss.backward()
        optimizer.step()
        read.append(loss.item())
    gradients = [None if item.grad is None else item.grad.tolist() for item in model.parameters()]
    return [read, gradients, [item.tolist() for item in model.state_dict().values()]]


@pytest.mark.parametrize(
    "loss_of", [penalty, penalty_after_reads, learned_after_reads, evaluated_between, what_gets_no_gradient]
)
def test_the_same_numbers_as_in_one_process_but_for_rounding(loss_of: Loss) -> None:
    wanted = train(build(), loss_of)
    for found in on_ranks(2, lambda model: train(farspan.distribute(model), loss_of), build):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_derivatives_themselves_may_be_computed_again_in_the_backward() -> None:
    wanted = train(build(), penalty_after_reads)
    found = on_ranks(2, lambda model: train(farspan.distribute(model, remat=True), penalty_after_reads), build)
    torch.testing.assert_close(found, [wanted] * 2, rtol=1e-12, atol=1e-12)


def weight(model: Any) -> None:
    with torch.no_grad():
        model.first.weight.mul_(2)


def loaded(model: Any) -> None:
    model.load_state_dict(model.state_dict())


def stepped(model: Any) -> None:
    model(BATCHES[0, 1]).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def evaluated(model: Any) -> None:
    model.eval()


def frozen(model: Any) -> None:
    model.first.requires_grad_(False)


def an_object(model: Any) -> None:
    model.centred.factor[0] = 2.0


def a_tensor(model: Any) -> None:
    model.centred.table.mul_(2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (weight, "first.weight has been written to since"),
        (loaded, "has been written to since"),
        (stepped, "has been written to since"),
        (evaluated, "has been set otherwise since"),
        (frozen, "has been set otherwise since"),
        (an_object, "has been set otherwise since"),
        (a_tensor, "has been set otherwise since"),
    ],
)
def test_what_has_been_changed_since_it_ran_is_a_named_error(change: Callable[[Any], None], words: str) -> None:
    def program(model: Any) -> None:
        x = BATCHES[0, 0].clone().requires_grad_()
        loss = model(x).sum()
        loss.item()
        change(model)
        grad(loss, x, create_graph=True)

    with pytest.raises(RecordError, match=words):
        on_ranks(2, lambda model: program(farspan.distribute(model)), build)


def test_a_buffer_that_calls_write_may_be_written_to_since() -> None:
    """The call is given what it was before it."""

    def program(model: Any) -> list[Any]:
        x = BATCHES[0, 0].clone().requires_grad_()
        loss = model(x).square().sum()
        found = [loss.item()]
        model.centred.mean.zero_()
        (slope,) = grad(loss, x, create_graph=True)
        slope.square().sum().backward()
        return [*found, model.first.weight.grad.tolist(), model.centred.mean.tolist()]

    wanted = program(build())
    for found in on_ranks(2, lambda model: program(farspan.distribute(model)), build):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_step_of_other_weights_between_does_no_harm() -> None:
    def program(model: Any) -> list[Any]:
        x = BATCHES[0, 0].clone().requires_grad_()
        loss = model.head(model.centred(torch.tanh(model.up(x.new_ones(8, 12) * x[:, :1])))).square().sum()
        found = [loss.item()]
        model.first(BATCHES[0, 1]).sum().backward()
        torch.optim.SGD(model.first.parameters(), lr=0.1).step()
        (slope,) = grad(loss, x, create_graph=True)
        slope.square().sum().backward()
        return [*found, [None if item.grad is None else item.grad.tolist() for item in model.parameters()]]

    wanted = program(build())
    for found in on_ranks(2, lambda model: program(farspan.distribute(model)), build):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_second_derivative_for_what_is_computed_again_is_a_named_error() -> None:
    """The derivative of tanh depends on its result. A first derivative is as in one process, and so is what follows the
    error."""

    def program(model: Any) -> Any:
        x = BATCHES[0, 0].clone().requires_grad_()
        h = torch.tanh(model.first(x))
        result = model.centred(h).sum()
        (slope,) = grad(result, x, create_graph=True)
        (first,) = grad(result, h, retain_graph=True)
        penalty = slope.square().sum()
        if isinstance(penalty, LazyTensor):
            with pytest.raises(RecordError, match="not all of its gradient comes to it"):
                grad(penalty, h)
        penalty.backward()
        return first.tolist(), model.first.weight.grad.tolist()

    for found in on_ranks(2, lambda model: program(farspan.distribute(model)), build):
        torch.testing.assert_close(found, program(build()), rtol=1e-12, atol=1e-12)


def test_a_hook_on_what_is_computed_again_is_a_named_error() -> None:
    """Not all of its gradient comes to it."""

    def program(model: Any) -> None:
        x = BATCHES[0, 0].clone().requires_grad_()
        h = torch.tanh(model.first(x))
        grad(model.centred(h).sum(), x, create_graph=True)
        h.register_hook(lambda gradient: gradient * 2)

    with pytest.raises(RecordError, match="gradients with a history have been taken"):
        on_ranks(2, lambda model: program(farspan.distribute(model)), build)


def test_what_the_program_holds_does_not_hold_what_it_was_made_of() -> None:
    """A running mean of losses, each of which is read before its backward."""

    def program(model: Any) -> list[int]:
        farspan.distribute(model)
        mean: Any = torch.zeros((), dtype=DTYPE)
        counts: list[int] = []
        for number in range(6):
            scores = model(BATCHES[number % 3, 0])
            mean = 0.9 * mean + 0.1 * scores.detach().mean()
            loss = (scores - mean).square().mean()
            loss.item()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad = None
            farspan.flush()
            gc.collect()
            counts.append(sum(type(item) is Call for item in gc.get_objects()))
        return counts

    counts = on_ranks(1, program, build)[0]
    assert counts[-1] <= counts[2]


def test_old_versions_are_kept_of_recorded_tensors_alone() -> None:
    meta = Meta((2,), (1,), torch.float32, torch.device("cpu"), True)
    of_gradient = Value(meta, 0)
    of_gradient.gradient_of = "weight"
    assert _is_recorded_apart(Value(meta, 0))
    for other in (torch.ones(2), Value(meta, EVERYWHERE), Value(meta, 0, name="weight"), of_gradient):
        assert not _is_recorded_apart(other)

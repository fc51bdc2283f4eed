"""`p.grad = tensor` where the program goes on using the tensor by another name: both are one memory, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from tests.support.plainly import assert_same_as_plainly
from tests.support.ranks import run_threads
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import farspan
from farspan.errors import RecordError

Program = Callable[[Any], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])


def backward(model: Any, number: int) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
    model(x).pow(2).sum().backward()


def ends(model: Any) -> tuple[Any, Any]:
    return model[0][0].weight, model[3][0].weight


def put_parts(model: Any, flat: Tensor) -> None:
    """Let each parameter's gradient be a part of `flat`."""
    start = 0
    for p in model.parameters():
        p.grad = flat[start : start + p.numel()].view_as(p)
        start += p.numel()


def flat_gradients(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# Two parameters with one gradient.


@program
def written_through_the_one(model: Any) -> None:
    a, b = ends(model)
    a.grad = b.grad
    b.grad.mul_(2)


@program
def written_through_the_other(model: Any) -> None:
    a, b = ends(model)
    a.grad = b.grad
    a.grad.mul_(2)


@program
def written_through_a_row(model: Any) -> None:
    a, b = ends(model)
    row = b.grad[0]
    a.grad = b.grad
    row.mul_(2)
    a.grad[0].add_(1)


@program
def clipped(model: Any) -> None:
    a, b = ends(model)
    a.grad = b.grad
    clip_grad_norm_(model.parameters(), 0.1)


@program
def cleared_in_the_first(model: Any) -> None:
    a, b = ends(model)
    kept = b.grad
    a.grad = kept
    b.grad = None
    kept.mul_(2)


@program
def exchanged(model: Any) -> None:
    a, b = ends(model)
    a.grad, b.grad = b.grad, a.grad
    a.grad.mul_(2)


@program
def data_is_set(model: Any) -> None:
    a, b = ends(model)
    a.grad.data = b.grad.data
    b.grad.mul_(2)


# What the program has computed, or made.


@program
def computed(model: Any) -> Any:
    a, b = ends(model)
    g = b.grad * 2
    a.grad = g
    g.mul_(2)
    seen = a.grad.tolist()
    a.grad.add_(1)
    seen += g.tolist()
    backward(model, 7)
    return [seen, g.tolist(), (g * 2).sum().item()]


@program
def computed_for_both(model: Any) -> Any:
    a, b = ends(model)
    a.grad = b.grad = g = a.grad + b.grad
    g.mul_(2)
    b.grad.add_(1)
    return [g.tolist(), a.grad.tolist()]


@program
def plain(model: Any) -> Any:
    a, b = ends(model)
    g = torch.full((4, 4), 0.1)
    a.grad = g
    a.grad.add_(1)
    b.grad = g
    b.grad.mul_(3)
    g[0] = 5.0
    return [g.tolist(), a.grad.tolist()]


@program
def other_name_of_the_attribute(model: Any) -> Any:
    a, b = ends(model)
    a._grad = g = b._grad * 2
    g.mul_(3)
    return a._grad.tolist()


# Parts of one tensor.


@program
def parts_of_plain_memory(model: Any) -> Any:
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    put_parts(model, flat)
    backward(model, 7)
    seen = [flat.tolist(), float(clip_grad_norm_(model.parameters(), 0.1)), flat.norm().item()]
    backward(model, 8)
    flat.mul_(0.5)
    flat[3] = 1.0
    return seen


@program
def parts_of_memory_that_lasts(model: Any) -> Any:
    flat = vars(model).setdefault("flat", torch.zeros(sum(p.numel() for p in model.parameters())))
    seen = flat.tolist()  # what was clipped in the step before
    put_parts(model, flat.zero_())
    backward(model, 7)
    clip_grad_norm_(model.parameters(), 0.1)
    return seen


@program
def parts_of_what_is_computed(model: Any) -> Any:
    first = flat_gradients(model)
    model.zero_grad()
    backward(model, 7)
    flat = first + flat_gradients(model)
    put_parts(model, flat)
    clip_grad_norm_(model.parameters(), 0.1)
    seen = flat.norm().item()
    flat.mul_(0.5)
    backward(model, 8)
    model.zero_grad()
    seen = [seen, flat.tolist()]
    backward(model, 9)
    return seen


# Gradients of a model that is not distributed.


@program
def from_another_model(model: Any) -> Any:
    other = vars(model).setdefault("other", [build()])[0]
    other.zero_grad(set_to_none=False)
    backward(other, 7)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.grad = q.grad
    clip_grad_norm_(other.parameters(), 0.1)
    seen = ends(model)[1].grad.tolist()
    backward(other, 8)
    return seen


@program
def to_another_model(model: Any) -> Any:
    other: Any = build()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = p.grad
    ends(model)[0].grad.mul_(0.5)
    ends(other)[1].grad.mul_(0.5)
    ends(other)[0].grad = g = ends(model)[1].grad * 2
    g.mul_(2)
    return [q.grad.tolist() for q in other.parameters()]


# What is one memory in other ways.


@program
def a_view_of_itself(model: Any) -> Any:
    a, _ = ends(model)
    flat = a.grad.view(-1)
    a.grad = flat.view_as(a)
    flat[flat.abs() < flat.abs().mean()] = 0.0
    backward(model, 7)
    return flat.tolist()


@program
def interleaved(model: Any) -> Any:
    a, b = ends(model)
    both = torch.cat([a.grad, b.grad], 1)
    a.grad, b.grad = both[:, :4], both[:, 4:]
    a.grad.add_(1)
    b.grad.mul_(2)
    seen = both.tolist()
    both[:, 3:5] = 0.5
    return seen


@program
def memory_that_only_gradients_have(model: Any) -> Any:
    (a, b), c = ends(model), model[1][0].weight
    both = torch.cat([a.grad, b.grad])
    a.grad, b.grad = both[:4], both[:4]
    del both
    a.grad.mul_(2)
    seen = b.grad.tolist()
    b.grad = c.grad = model[2][0].weight.grad
    model[2][0].weight.grad = None
    c.grad.add_(1)
    return [seen, b.grad.tolist()]


@program
def a_part_of_a_part(model: Any) -> Any:
    a, b = ends(model)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    put_parts(model, flat)
    b.grad = a.grad
    flat.add_(2)
    seen = [b.grad.tolist()]
    b.grad.add_(1)
    seen += [a.grad.tolist(), flat.tolist()]
    a.grad.mul_(3)
    return [*seen, b.grad.tolist(), flat.tolist()]


@program
def written_as_data(model: Any) -> Any:
    a, b = ends(model)
    other, flat = nn.Parameter(torch.ones(4, 4)), torch.zeros(16)
    alias = other.detach().data
    a.grad, b.grad = other.data, flat.view(4, 4)
    with torch.no_grad():
        other.mul_(2)
    flat.data.add_(0.5)
    alias[0] = 3.0
    return [a.grad.tolist(), b.grad.tolist()]


@program
def arrays(model: Any) -> Any:
    a, b = ends(model)
    array, flat = numpy.full((4, 4), 0.1, dtype=numpy.float32), torch.zeros(16)
    a.grad, b.grad = torch.from_numpy(array), flat.view(4, 4)
    array[0] = 3.0
    view = flat.numpy()
    view += 1
    seen = [a.grad.tolist(), b.grad.tolist()]
    b.grad[0].mul_(2)
    backward(model, 7)
    seen += [array.tolist(), view.tolist()]
    array *= 0.5
    return seen


class Decaying(torch.optim.SGD):
    """Writes into the gradients in its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5).add_(p, alpha=0.01)
                p.sub_(p.grad, alpha=0.1)
                p.grad.zero_()


@program
def written_by_the_step(model: Any) -> Any:
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    put_parts(model, flat)
    backward(model, 7)
    Decaying(model.parameters()).step()
    seen = flat.tolist()
    backward(model, 8)
    return [seen, flat.tolist()]


@program
def of_another_shape(model: Any) -> Any:
    a, b = ends(model)
    seen = []
    for gradient in (torch.ones(4, 4, dtype=torch.float64), torch.ones(4), b.grad[0], b.grad.double(), 3):
        try:
            a.grad = gradient
        except (RuntimeError, TypeError) as error:
            seen.append(str(error))
    return seen


def trained(act: Program) -> Program:
    def train(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen: list[Any] = []
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            seen.append(act(model))
            if step:
                seen.append([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
            optimizer.step()
        return [*seen, [p.tolist() for p in model.parameters()]]

    return train


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gradient_is_the_tensor_that_it_is_set_to(name: str, num_ranks: int) -> None:
    assert_same_as_plainly(build, trained(PROGRAMS[name]), num_ranks)


@pytest.mark.parametrize("is_part", [False, True])
def test_a_backward_that_adds_to_both_names_of_one_gradient_is_refused(is_part: bool) -> None:
    def train(rank: int) -> str:
        model = farspan.distribute(build())
        a, b = ends(model)
        backward(model, 1)
        if is_part:
            flat = torch.zeros(20)
            a.grad, b.grad = flat[:16].view(4, 4), flat[2:18].view(4, 4)
        else:
            a.grad = b.grad
        backward(model, 2)
        with pytest.raises(RecordError) as error:
            [float(p.grad.sum()) for p in (a, b)]
        return str(error.value)

    assert all(
        "is memory of another gradient, and a backward has added to both" in text for text in run_threads(2, train)
    )


def test_what_is_refused_stops_no_other_model() -> None:
    def train(rank: int) -> str:
        first = farspan.distribute(build())
        a, b = ends(first)
        backward(first, 1)
        a.grad = b.grad
        with pytest.raises(RecordError) as error:
            Decaying(first.parameters()).step()
        a.grad = b.grad
        backward(first, 2)
        other = farspan.distribute(build())
        backward(other, 3)
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        return str(error.value)

    assert all("the optimizer has written into" in text for text in run_threads(2, train))

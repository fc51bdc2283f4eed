"""A gradient that the program has kept, a view of it, and `p.grad` are one memory: backwards add to all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import assert_same_as_plainly
from torch import Tensor, nn

_generator = torch.Generator().manual_seed(3)
BATCHES = [(torch.randn(6, 4, generator=_generator), torch.randn(6, 3, generator=_generator)) for _ in range(5)]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


TAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda g: g,
    "view": lambda g: g.view(-1),
    "detached": lambda g: g.detach(),
    "row": lambda g: g[1],
    "view of a view": lambda g: g.view(2, 4, 4).transpose(0, 1)[2],
}
USES: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda t: t.tolist(),
    "printed": str,
    "array": lambda t: t.numpy().sum().item(),
    "number": lambda t: float(t.flatten()[1]),
    "branch": lambda t: bool((t > 0).all()),
    "sum": lambda t: t.sum().item(),
    "norm": lambda t: torch.nn.utils.get_total_norm([t]).item(),
    "with plain": lambda t: (torch.ones(()) + t).sum().item(),
    "copied into plain": lambda t: torch.zeros(t.shape).copy_(t).sum().item(),
    "deep copy": lambda t: copy.deepcopy(t).tolist(),
}


def backward(model: nn.Module, number: int, *, reads_loss: bool) -> None:
    x, y = BATCHES[number]
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if reads_loss:
        loss.item()


def gradient_of(model: Any) -> Any:
    return model[0].weight.grad


def kept(take: Callable[[Tensor], Tensor], reads_loss: bool) -> Callable[[Any], Any]:
    def program(model: Any) -> Any:
        found: list[Any] = []
        for number, (name, use) in enumerate(USES.items()):
            model.zero_grad()
            backward(model, 0, reads_loss=reads_loss)
            tensor = take(gradient_of(model))
            if number % 2:
                found.append(use(tensor))
            backward(model, 1, reads_loss=reads_loss)
            found.append((name, use(tensor)))
            backward(model, 2, reads_loss=reads_loss)
            model.zero_grad(set_to_none=False)
            found.append(use(tensor))
            backward(model, 3, reads_loss=reads_loss)
            found.append(use(tensor))
            backward(model, 4, reads_loss=reads_loss)
            model[0].weight.grad = None
            found.append(use(tensor))  # what the gradient was when the parameter lost it
            backward(model, 0, reads_loss=reads_loss)
            found.append(use(tensor))
        return found

    return program


@pytest.mark.parametrize("reads_loss", [False, True], ids=["queued", "loss read"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("take", TAKES)
def test_what_is_kept_of_a_gradient_is_what_backwards_have_added(take: str, num_ranks: int, reads_loss: bool) -> None:
    assert_same_as_plainly(build, kept(TAKES[take], reads_loss), num_ranks)


def written(model: Any) -> Any:
    """Writes through what was kept show in `p.grad`, in the norm and in the step; and the other way round."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found = []
    weight = model[0].weight
    backward(model, 0, reads_loss=False)
    kept, row = weight.grad, weight.grad[2]
    for number in range(1, 5):
        backward(model, number, reads_loss=number % 2 == 0)
        kept.mul_(0.5)
        row.add_(1.0)
        found += [weight.grad is kept, torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item(), row.tolist()]
        optimizer.step()
        found.append(kept.sum().item())
        weight.grad.mul_(2.0)
        found += [kept.tolist(), row.tolist()]
        with torch.no_grad():
            weight.add_(kept, alpha=-0.01)
    return found, [each.tolist() for each in model.parameters()]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_writes_through_a_kept_gradient(num_ranks: int) -> None:
    assert_same_as_plainly(build, written, num_ranks)

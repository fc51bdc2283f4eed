"""Recorded tensors that the program makes leaves of autograd, and where memory is said to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, mlp, on_ranks, weights
from torch import nn

import farspan


def trained_in_copies(model: nn.Module, *, are_parameters: bool) -> Any:
    if are_parameters:
        copies: list[Any] = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    else:
        copies = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.Adam(copies, lr=0.01)
    for _ in range(3):
        model.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        for mine, p in zip(copies, model.parameters(), strict=True):
            assert p.grad is not None
            mine.grad = p.grad.detach().clone().float()
        optimizer.step()
        for mine, p in zip(copies, model.parameters(), strict=True):
            p.data.copy_(mine.data)
    return weights(model), [item.tolist() for item in copies]


def saliency(model: Any) -> Any:
    hidden = model.layers[0](X).detach().requires_grad_()
    model.head(hidden).sum().backward()
    attacked = X.clone()
    for _ in range(2):
        attacked = attacked.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(attacked), Y), attacked)
        attacked = attacked + 0.01 * gradient.sign()
    return hidden.grad.tolist(), attacked.tolist()


def frozen_with_a_hook(model: Any) -> Any:
    """As transformers' `enable_input_require_grads`."""
    model.requires_grad_(False)
    model.head.weight.requires_grad_(True)
    model.layers[0].register_forward_hook(lambda module, args, out: out.requires_grad_(True))
    F.cross_entropy(model(X), Y).backward()
    return model.head.weight.grad.tolist(), [p.grad is None for p in model.parameters()]


STORIES = [
    lambda model: trained_in_copies(model, are_parameters=False),
    lambda model: trained_in_copies(model, are_parameters=True),
    saliency,
    frozen_with_a_hook,
]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("story", STORIES, ids=["copies", "parameters", "saliency", "hook"])
def test_a_recorded_tensor_becomes_a_leaf(story: Any, num_ranks: int) -> None:
    wanted = story(mlp())
    for rank, got in enumerate(on_ranks(num_ranks, lambda model: story(farspan.distribute(model)))):
        assert got == wanted, f"rank {rank}"


def test_loading_tensors_of_its_own_does_not_end_the_window() -> None:
    def program(model: nn.Module) -> int:
        model = farspan.distribute(model)
        losses = [F.cross_entropy(model(X + number), Y) for number in range(2)]
        before = farspan.last_step()
        nn.Parameter(torch.ones(3)).requires_grad_(False)  # as unpickling a batch of a worker does
        torch.ones(3).requires_grad_()
        assert farspan.last_step() is before
        return len(losses)

    assert on_ranks(2, program) == [2, 2]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5)
        self.second.weight = self.first.weight


def places(model: Any) -> Any:
    found: list[dict[Any, list[str]]] = [{}, {}, {}, {}]
    for name, p in model.named_parameters(remove_duplicate=False):
        for table, key in zip(
            found,
            (p.data_ptr(), p.data.data_ptr(), (p.untyped_storage().data_ptr(), p.untyped_storage().nbytes()), p),
            strict=True,
        ):
            table.setdefault(key, []).append(name)
    return [list(table.values()) for table in found], torch.equal(model.first.weight, model.second.weight)


def test_shared_parameters_are_found_by_their_address_on_every_rank() -> None:
    wanted = places(Tied())
    for got in on_ranks(3, lambda model: places(farspan.distribute(model)), Tied):
        assert got == wanted

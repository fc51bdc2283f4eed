"""Sparse gradients read and written by the program itself, outside an optimizer's step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.support.plainly import assert_same_as_plainly
from torch import Tensor, nn

TOKENS = torch.randint(30, (8, 4, 5), generator=torch.Generator().manual_seed(0))
PLAN = {"embedding": 0, "bag": 1, "head": 0}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 6, sparse=True)
        self.bag = nn.EmbeddingBag(30, 6, sparse=True, mode="sum")
        self.head = nn.Linear(12, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.cat([self.embedding(tokens).mean(1), self.bag(tokens)], 1))


def _backward(model: Any, number: int) -> float:
    tokens = TOKENS[number]
    loss = F.cross_entropy(model(tokens), tokens[:, 0] % 3)
    loss.backward()
    return loss.item()


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _look_at(model: Any) -> list[Any]:
    seen: list[Any] = []
    for parameter in model.parameters():
        gradient = parameter.grad
        seen += [gradient.is_sparse, str(gradient.layout), gradient.to_dense().tolist(), _values(gradient).tolist()]
        if gradient.is_sparse:
            seen += [gradient._nnz(), gradient.is_coalesced(), gradient.coalesce().indices().tolist(), str(gradient)]
    return seen


def _accumulate(model: Any) -> Any:
    """Two micro-batches, looked at after each; scaled in place; stepped."""
    sparse = torch.optim.SparseAdam([model.embedding.weight, model.bag.weight], 0.1)
    dense = torch.optim.Adam(model.head.parameters())
    seen: list[Any] = []
    for number in range(0, 6, 2):
        for each in (number, number + 1):
            seen += [_backward(model, each), _look_at(model)]
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        seen.append(_look_at(model))
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
        seen.append(model.embedding.weight.grad)
    return seen, {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def _set(model: Any) -> Any:
    """Gradients clipped by hand, given back coalesced, given back as dense ones, and used without an optimizer."""
    seen: list[Any] = [_backward(model, 0)]
    total = sum(_values(parameter.grad).pow(2).sum() for parameter in model.parameters()) ** 0.5
    for module in (model.embedding, model.bag):
        gradient = module.weight.grad.coalesce()
        values = gradient.values().clamp(-0.01, 0.01)
        module.weight.grad = torch.sparse_coo_tensor(
            gradient.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
        )
    seen += [float(total), _look_at(model)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=-0.1)
    model.zero_grad(set_to_none=False)
    seen += [_look_at(model), _backward(model, 1)]
    for module in (model.embedding, model.bag):
        module.weight.grad = module.weight.grad.to_dense()
    seen += [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).item(), _look_at(model)]
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.zero_grad()
    return seen, _backward(model, 2), _look_at(model)


def test_sparse_gradients_are_read_as_in_one_process() -> None:
    """`p.grad.is_sparse` was False, and `p.grad.coalesce()` an error."""
    assert_same_as_plainly(Words, _accumulate, 1)
    assert_same_as_plainly(Words, _accumulate, 2, plan=PLAN)
    assert_same_as_plainly(Words, _accumulate, 3, plan={**PLAN, "head": 2})


def test_sparse_gradients_are_set_as_in_one_process() -> None:
    assert_same_as_plainly(Words, _set, 1)
    assert_same_as_plainly(Words, _set, 2, plan=PLAN)
    assert_same_as_plainly(Words, _set, 3, plan={**PLAN, "head": 2})

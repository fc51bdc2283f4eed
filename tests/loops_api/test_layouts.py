"""Tensors that are not stored row by row: one element with any stride, sparse inputs."""

from __future__ import annotations

from typing import Any

import torch
from tests.support.loop import X, same_everywhere
from tests.support.plainly import assert_same_as_plainly
from torch import Tensor, nn

from farspan.comm.tensor_bytes import pack_tensor, unpack_tensor


def test_one_element_that_stands_for_many_can_be_read() -> None:
    """`Categorical.log_prob` makes such ones: of shape [1] and stride 0."""

    def program(model: nn.Module, distribute: Any) -> Any:
        distribute(model)
        loss = model(X).square().mean().expand(1)
        loss.backward()
        return loss.item(), loss.tolist()

    same_everywhere(program, 2)


def test_one_element_that_stands_for_many_has_bytes() -> None:
    for tensor in (torch.tensor(3).expand(1), torch.tensor(2.5).expand(1, 1)):
        header, payload = pack_tensor(tensor)
        assert unpack_tensor(header, bytes(payload)).tolist() == tensor.tolist()


class GraphNetwork(nn.Module):
    """Two layers, each with a product with a sparse matrix, of which fake tensors know nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = torch.relu(torch.spmm(edges, self.first(x)))
        return torch.spmm(edges, self.second(h))


def test_sparse_inputs_are_used_like_others() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=generator)
    edges = (torch.rand(6, 6, generator=generator) * torch.eye(6).roll(1, 0)).to_sparse()

    def program(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x, edges).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, {name: tensor.tolist() for name, tensor in model.state_dict().items()}

    assert_same_as_plainly(GraphNetwork, program, 2)

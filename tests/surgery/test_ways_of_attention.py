"""Attention in evaluation takes torch's way for tensors without overrides, as in the plain program: all bits are those,
and `nn.TransformerEncoder` leaves zeros where a text is padded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.plainly import assert_same_as_plainly
from torch import Tensor, nn

import farspan
from farspan.record.parameters.copying import plan_by_model

PADDING = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]).bool()
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(7))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


def evaluate_between_steps(model: nn.Module) -> Any:
    """With a teacher outside of the model."""
    teacher = copy.deepcopy(_teacher).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for step in range(2):
        with torch.no_grad():
            wanted = teacher(X + step, src_key_padding_mask=PADDING)
        model.train()
        optimizer.zero_grad()
        (model(X + step, PADDING) - wanted[:, 0, :2]).square().mean().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            seen += [model(X).tolist(), model(X, PADDING).tolist(), wanted.tolist()]
            seen.append(teacher(model(X)[:, None].expand(3, 2, 2).repeat(1, 1, 4)).tolist())
        with torch.inference_mode():
            seen.append(model(X, PADDING).tolist())
    return seen


_teacher = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "plan",
    [
        {"encoder.layers.0": 0, "encoder": 1, "head": 0},
        {"": 0, "encoder.layers.1.linear1": 1, "encoder.layers.2.self_attn": 1},
    ],
)
def test_evaluation_takes_the_plain_programs_way(plan: dict[str, int]) -> None:
    assert_same_as_plainly(Encoder, evaluate_between_steps, 2, plan=plan)


class Shown(Tensor):
    """Has overrides of its own."""


def test_other_overrides_are_still_found() -> None:
    model = farspan.distribute(nn.Linear(2, 2), seed=0)
    assert model in plan_by_model
    assert torch.overrides.has_torch_function([torch.ones(2).as_subclass(Shown), model.weight])
    assert not torch.overrides.has_torch_function([torch.ones(2), model.weight])

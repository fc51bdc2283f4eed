"""Parameters of a wide stage that a module does not use, as its data decide: an expert that no row goes to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from tests.wide.test_loops import largest_difference, same
from torch import Tensor, nn

import farspan
from farspan.execute.weights.reductions import as_absent, is_absent
from farspan.graph import Edge, Meta


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        chances = self.gate(x).softmax(-1)
        weights, chosen = chances[:, :-1].max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None] * self.scale)
        return out


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 8), nn.Linear(8, 5))


def train(model: Any) -> Any:
    """Three rows for three experts of four: some stand idle in each micro-batch, the last one always."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found: list[Any] = []
    for step in range(6):
        optimizer.zero_grad()
        for number in range(4):
            generator = torch.Generator().manual_seed(10 * step + number)
            x = torch.randn(1 + number % 3, 8, generator=generator)
            F.cross_entropy(model(x), torch.arange(len(x))).backward()
        found += [item.grad is None for item in model.parameters()]
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return found, {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("gradient_reduction", ["exact", "sum"])
@pytest.mark.parametrize(
    ("num_ranks", "places"), [(3, ["rank:0+rank:1", "rank:2"]), (2, ["rank:1+rank:0", "rank:1"])], ids=["2-1", "over 2"]
)
def test_have_the_gradients_of_one_process(num_ranks: int, places: list[str], gradient_reduction: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = net()
    wanted = train(copy.deepcopy(model))
    models = [copy.deepcopy(model) for _ in range(num_ranks)]
    plan = {"0": places[0], "1": places[0], "2": places[1], "3": places[1]}
    found = run_threads(
        num_ranks,
        lambda rank: train(farspan.distribute(models[rank], plan=plan, gradient_reduction=gradient_reduction)),
    )
    assert True in wanted[0], "an expert had no gradient in a step"
    for item in found:
        assert same(item, wanted) if gradient_reduction == "exact" else largest_difference(item, wanted) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_no_gradient_is_taken_for_an_absent_one(dtype: torch.dtype) -> None:
    message: Any = type("Message", (), {"is_between_gpus": False})
    for shape, stride in [((), ()), ((3, 2), (1, 3))]:
        edge = Edge("weight", Meta(shape, stride, dtype, torch.device("cpu"), False), *[None, None])  # type: ignore[arg-type]
        absent = as_absent(edge, message)
        assert is_absent(absent) and (absent.shape, absent.stride(), absent.dtype) == (shape, stride, dtype)
        for value in (0.0, -0.0, 1.0, float("inf"), float("nan"), -float("nan")):
            assert not is_absent(torch.full_like(absent, value))
        assert not is_absent(torch.zeros_like(absent) / 0)
    assert not is_absent(torch.empty(0, dtype=dtype))

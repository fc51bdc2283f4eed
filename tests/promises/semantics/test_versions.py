"""What a module writes into its own buffers and weights while a pipeline runs several micro-batches.

In the plain program the backward of a micro-batch comes before the forward of the next one; in a pipeline it does not,
and still needs what its own forward has seen.
"""

# attributes of modules are a Tensor or a Module to type checkers
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import assert_same_as_plainly, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def write(self, x: Tensor) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        before = self.linear(x) * self.scale
        with torch.no_grad():
            self.write(x.abs().mean(0))
        return torch.tanh(self.linear(before) * self.scale)


class Assigns(Scaled):
    def write(self, x: Tensor) -> None:
        self.scale = 0.7 * self.scale + 0.3 * x


class AssignsInTheTable(Scaled):
    def write(self, x: Tensor) -> None:
        self._buffers["scale"] = 0.7 * self.scale + 0.3 * x


class SetsData(Scaled):
    def write(self, x: Tensor) -> None:
        self.scale.data = 0.7 * self.scale.data + 0.3 * x


class WritesData(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.mul_(0.7).add_(0.3 * x.detach().abs().mean(0))
        return torch.tanh(self.linear(x) * self.scale)


class WritesInPlace(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale[2:].lerp_(x.abs().mean(0)[2:], 0.3)
        return torch.tanh(self.linear(x) * self.scale)


class WritesAView(WritesInPlace):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", self.scale[:4])

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.add_(0.3)
        return torch.tanh(self.linear(x) * self.scale)


class WritesByData(Scaled):
    """What it does follows from what is in its arguments, so that only a run shows it."""

    def write(self, x: Tensor) -> None:
        self.scale = self.scale * (0.9 if x.sum().item() > 6 else 1.1)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


class KeepsInContext(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y = Product.apply(self.linear(x), self.scale)
        with torch.no_grad():
            self.scale.mul_(0.8)
        return torch.tanh(y)


class Normalises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


class NormalisesWithBoth(Normalises):
    """A normalisation in training mode, which does not need its statistics in the backward, and in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        self.norm.eval()
        z = self.norm(y)
        self.norm.train()
        return torch.tanh(y + z)


class NormalisesInCheckpoint(Normalises):
    """The backward runs the normalisation again, which counts once more."""

    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(checkpoint(lambda y: self.norm(self.linear(y)), x, use_reentrant=self.use_reentrant))


class DecaysData(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.mul_(0.9)
        return torch.tanh(self.linear(x))


class SetsWeightData(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = F.normalize(self.linear.weight.data, dim=1) * x.detach().mean().exp()
        return torch.tanh(self.linear(x))


class ClampsWeight(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.3, 0.3).mul_(0.95)
        return torch.tanh(self.linear(x))


class DecaysByData(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.mul_(0.9 if x.sum().item() > 0 else 1.1)
        return torch.tanh(self.linear(x))


class Two(nn.Module):
    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = nn.Linear(8, 8), part(), part(), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.b(self.a(torch.tanh(self.first(x)))))


BUFFERS = [
    Assigns, AssignsInTheTable, SetsData, WritesData, WritesInPlace, WritesAView, WritesByData, KeepsInContext,
    NormalisesWithBoth, NormalisesInCheckpoint, lambda: NormalisesInCheckpoint(use_reentrant=True),
]  # fmt: skip
WEIGHTS = [DecaysData, SetsWeightData, ClampsWeight, DecaysByData]


def plan_of(num_ranks: int) -> dict[str, str]:
    return {name: f"rank:{i * num_ranks // 4}" for i, name in enumerate(("first", "a", "b", "last"))}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("part", [*BUFFERS, *WEIGHTS])
def test_a_backward_finds_what_its_forward_has_seen(part: Callable[[], nn.Module], num_ranks: int) -> None:
    assert_same_as_plainly(lambda: Two(part), train, num_ranks, plan=plan_of(num_ranks))


@pytest.mark.parametrize("options", [{"schedule": "gpipe"}, {"schedule": "1f1b"}, {"remat": ["a", "b"]}], ids=str)
@pytest.mark.parametrize("part", [Assigns, WritesInPlace, WritesAView, NormalisesWithBoth, DecaysData])
def test_under_each_schedule_and_when_computed_again(part: Callable[[], nn.Module], options: dict[str, object]) -> None:
    assert_same_as_plainly(lambda: Two(part), train, 2, plan=plan_of(2), **options)


class ReadsOutside(Two):
    """The root uses what its part has written: each time what it is by then."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(torch.tanh(self.first(x))) * self.a.scale
        return self.last(self.b(y) * self.a.scale + self.b.scale)


class ReadsWeightsOutside(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.b(self.a(torch.tanh(self.first(x)))), self.a.linear.weight)
        return self.last(y) + (self.a.linear.weight * self.first.weight).sum() * 0.1


class SharesItsNorm(Two):
    """Two parts have one normalisation: all its calls count, in the order of the program."""

    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__(part)
        self.b.norm = self.a.norm


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("model", "part"),
    [
        (ReadsOutside, Assigns),
        (ReadsOutside, WritesInPlace),
        (ReadsWeightsOutside, DecaysData),
        (ReadsWeightsOutside, ClampsWeight),
        (SharesItsNorm, Normalises),
    ],
)
def test_others_see_what_a_part_has_written(
    model: Callable[..., nn.Module], part: Callable[[], nn.Module], num_ranks: int
) -> None:
    assert_same_as_plainly(lambda: model(part), train, num_ranks, plan=plan_of(num_ranks))

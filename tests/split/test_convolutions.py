"""Convolutions of split stages: by channels of their result, of their input, or by groups; and what follows them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import PlanError
from farspan.execute.process.world import current_engine

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """Two convolutions with batch norms, and a residual."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out)
        self.conv2, self.bn2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out)
        self.down = nn.Conv2d(num_in, num_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        h += self.down(x)
        return F.relu(h, inplace=True)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None)
        self.block, self.fc = Block(8, 16), nn.Linear(16 * 16, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.stem(x))), 2)
        return self.fc(self.block(x).flatten(1))


class UShaped(nn.Module):
    """Skips are joined along channels; the way up is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.down, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 2, stride=2), nn.Conv2d(8, 16, 1)
        self.up, self.norm = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.GroupNorm(4, 16)
        self.last = nn.Conv2d(16, 3, 3, padding=2, dilation=2, padding_mode="reflect")

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.a(x))
        up = self.up(F.silu(self.b(F.relu(self.down(x)))))
        return self.last(F.relu(self.norm(torch.cat([x, up], dim=1))))


class Separable(nn.Module):
    """By groups, with a squeeze and excitation in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.deep = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 12, 3, stride=2, padding=1, groups=12)
        self.bn = nn.BatchNorm2d(12, affine=False)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.pairs, self.project = nn.ConvTranspose2d(12, 24, 2, groups=6), nn.Conv2d(24, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.bn(self.deep(self.expand(x))))
        x = x * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        x = F.dropout2d(F.leaky_relu(self.pairs(x)), 0.2, self.training)
        return self.project(x).mean((2, 3))


class Lines(nn.Module):
    """One dimension, causal, gated; then without a batch, and of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(24, 16, 3, dilation=2), nn.Conv1d(8, 8, 1)
        self.alone, self.back = nn.Conv1d(8, 16, 3, padding="same"), nn.ConvTranspose1d(8, 6, 3)
        self.solid, self.last = nn.Conv3d(1, 4, 2), nn.Conv3d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        values, gate = self.a(F.pad(x.flatten(1, 2), (4, 0))).chunk(2, dim=1)
        x = self.back(F.glu(self.alone(self.b(values.tanh() * gate.sigmoid())[0]), 0))
        return self.last(F.relu(self.solid(x[None, None, None, :, :6].expand(2, 1, 3, -1, -1))))


class LaidOut(nn.Module):
    """Channels last in memory, as the program sees as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.c = nn.Conv2d(8, 12, 1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(F.relu(self.bn(self.a(x.contiguous(memory_format=torch.channels_last)))))
        assert x.is_contiguous(memory_format=torch.channels_last)
        x = F.relu(self.c(x))
        assert x.is_contiguous(memory_format=torch.channels_last)
        return x.amax((2, 3))


class Narrow(nn.Sequential):
    """Little, of which every row of a batch is by itself."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5))


def train(model: Any, *, low: bool = False) -> Any:
    """Returns losses (two of them without gradient), the first step's gradients, and all that the model has then."""
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: list[float] = []
    first: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        losses: list[Tensor] = []
        for number in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                result = model(IMAGES + 0.1 * (step + number))
            losses.append(result.float().square().mean())
            losses[-1].backward()
        first = first or {name: item.grad.tolist() for name, item in model.named_parameters()}
        optimizer.step()
        found += [loss.item() for loss in losses]
        model.eval()
        with torch.no_grad():
            found += [model(IMAGES * number).float().abs().mean().item() for number in range(2)]
        model.train()
    return found, first, {name: item.tolist() for name, item in model.state_dict().items()}


def largest_difference(one: Any, other: Any) -> float:
    """Returns it relative to the largest number of losses, of gradients, and of each tensor of the model."""
    pairs = [
        ([one[0]], [other[0]]),
        (one[1].values(), other[1].values()),
        *(([one[2][name]], [other[2][name]]) for name in one[2]),
    ]
    found: list[float] = []
    for ones, others in pairs:
        first, second = [
            torch.cat([torch.tensor(item).double().flatten() for item in items]) for items in (ones, others)
        ]
        found.append(((first - second).abs().max() / first.abs().max().clamp_min(1e-3)).item())
    return max(found)


def run(kind: type[nn.Module], num_ranks: int = 2, *, low: bool = False, again: bool = False, **arguments: Any) -> Any:
    """Returns how far a model is from the plain loop, and the forms of its parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = kind()
    wanted = train(copy.deepcopy(model), low=low)

    def on_rank(rank: int) -> Any:
        split = farspan.distribute(copy.deepcopy(model), **(arguments or {"tensor_parallel": num_ranks}))
        found, engine = train(split, low=low), current_engine()
        assert engine is not None
        matrices = engine.recorder.splitting.matrices
        forms = {name: matrices.form_of(name) for name, _ in split.named_parameters()}
        return found, {name.removesuffix(".weight"): form for name, form in forms.items() if form[0]}

    first, *others = [item for _ in range(1 + again) for item in run_threads(num_ranks, on_rank)]
    assert all(repr(item) == repr(first) for item in others), "to the last bit on all ranks, and again"
    return largest_difference(wanted, first[0]), {name: form for name, (form, _) in first[1].items()}


@pytest.mark.parametrize(
    ("kind", "columns", "rows"),
    [
        (Residual, "stem block.conv2", "block.conv1 block.down fc"),
        (UShaped, "a b", "down up last"),
        (Separable, "expand deep excite pairs", "squeeze project"),
        (Lines, "a alone solid", "b back last"),
        (LaidOut, "a", "b"),
    ],
)
def test_the_numbers_of_one_process_with_all_that_can_be_in_parts(
    kind: type[nn.Module], columns: str, rows: str
) -> None:
    off, forms = run(kind, again=kind is Residual)
    assert off < 1e-5
    found = [" ".join(name for name, form in forms.items() if form == each) for each in ("column", "row")]
    assert [set(each.split()) for each in found] == [set(columns.split()), set(rows.split())], forms


@pytest.mark.parametrize(
    ("kind", "num_ranks", "arguments"),
    [
        (Residual, 3, {"tensor_parallel": 3}),
        (Residual, 4, {"tensor_parallel": 2, "stages": 2}),
        (Narrow, 2, {"tensor_parallel": 2, "micro_batches": 2}),
        (Separable, 2, {"tensor_parallel": {"*": "column"}}),
        (LaidOut, 2, {"tensor_parallel": {"a": "whole", "c": "column"}}),
    ],
)
def test_in_every_arrangement(kind: type[nn.Module], num_ranks: int, arguments: dict[str, Any]) -> None:
    off, forms = run(kind, num_ranks, **arguments)
    assert off < 1e-5
    layouts = arguments["tensor_parallel"]
    for name, layout in layouts.items() if isinstance(layouts, dict) else ():
        assert {form for each, form in forms.items() if name in ("*", each)} == {layout}


def test_autocast_keeps_its_precision() -> None:
    """The sum of what members give is in the precision in which the whole would be, with its bias."""
    off, forms = run(Separable, low=True)
    assert off < 2e-2
    assert forms["project"] == "row"


def test_names_of_convolutions_mean_matrices() -> None:
    def on_rank(rank: int) -> str:
        with pytest.raises(PlanError, match="'bn' means no matrix") as caught:
            farspan.distribute(Residual(), tensor_parallel={"bn": "row"})
        return caught.value.hint

    assert all("stem.weight" in hint for hint in run_threads(2, on_rank))

"""Plain tensors that modules hold and write in their forward: each write counts once, and everybody sees it."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from tests.support.plainly import X, assert_same_as_plainly, train
from torch import Tensor, nn


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: Any = torch.zeros(6, 8)
        self.count = torch.zeros((), dtype=torch.long)

    def write(self, y: Tensor) -> None:
        self.seen.copy_(y)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.write(y.detach())
        return y


class Slices(Part):
    """Nothing but views of the tensor is written."""

    def write(self, y: Tensor) -> None:
        self.seen[0] = y[0]
        self.seen[1:3] *= 0.5
        self.seen.view(-1)[20:28].add_(y[1])
        torch.mul(self.seen, 0.9, out=self.seen)


class Data(Part):
    """As old code writes: past the count of versions."""

    def write(self, y: Tensor) -> None:
        self.seen.data.copy_(y.data)
        self.count.data += 1


class Mean(Part):
    def write(self, y: Tensor) -> None:
        self.seen = 0.9 * self.seen + 0.1 * y.mean(0)
        self.count += 1


class Row(Part):
    """A view that the module keeps of the tensor it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.row = self.seen[1]

    def write(self, y: Tensor) -> None:
        self.row.add_(y.mean(0))


class Queue(Part):
    """A queue of keys, with its pointer in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.held = types.SimpleNamespace(keys=torch.zeros(18, 8), pointer=torch.zeros(1, dtype=torch.long))

    def write(self, y: Tensor) -> None:
        start = int(self.held.pointer)
        self.held.keys[start : start + 6] = y
        self.held.pointer[0] = (start + 6) % 18
        self.seen = self.held.keys.view(3, 6, 8).mean(0)


class Model(nn.Module):
    def __init__(self, part: type[nn.Module]) -> None:
        super().__init__()
        self.part = part()
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.part(x))
        part: Any = self.part
        return self.head(y + 0.3 * part.seen * (1 + part.count))  # the root reads it


def train_and_read(model: Any) -> Any:
    """What training gives, and what the loop can read between micro-batches and after it."""
    read: list[Any] = []

    def loss_of(out: Tensor) -> Tensor:
        read.append([model.part.seen.tolist(), model.part.count.item()])
        return out.square().mean()

    return train(model, X, loss_of), read, model.part.seen.tolist(), int(model.part.count)


def plan_of(num_ranks: int, *names: str) -> dict[str, str]:
    return {name: f"rank:{(number + 1) % num_ranks}" for number, name in enumerate(names)}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("part", [Part, Slices, Data, Mean, Row, Queue])
def test_write_of_a_held_tensor_is_seen_by_all(part: type[nn.Module], num_ranks: int) -> None:
    plan = plan_of(num_ranks, "part", "middle", "head")
    assert_same_as_plainly(lambda: Model(part), train_and_read, num_ranks, plan=plan)


class SharingPart(nn.Module):
    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.shared.mul_(0.5).add_(y.detach().mean(0))
        return y + self.shared


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.zeros(8)
        self.one = SharingPart(self.shared)
        self.other = SharingPart(self.shared)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.other(self.one(x)) * (1 + self.shared))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_modules_of_several_ranks_write_into_one_tensor(num_ranks: int) -> None:
    def program(model: Any) -> Any:
        return train(model), model.shared.tolist()

    assert_same_as_plainly(Sharing, program, num_ranks, plan=plan_of(num_ranks, "one", "other", "head"))


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.latest = torch.zeros(8)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.latest = y.detach().mean(0)
        self.num_calls += 1
        return y


class Reader(nn.Module):
    """Knows another module of the model, and reads what that one has computed last."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.source = [source]

    def forward(self, x: Tensor) -> Tensor:
        source: Any = self.source[0]
        return torch.tanh(self.linear(x)) + source.latest * (1 + 0.1 * source.num_calls)


class BoundReader(Reader):
    """Knows it by one of its methods."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__(source)
        self.method = source.extra_repr
        self.__dict__.pop("source")

    def forward(self, x: Tensor) -> Tensor:
        source: Any = self.method.__self__  # type: ignore[attr-defined]
        return torch.tanh(self.linear(x)) + source.latest * (1 + 0.1 * source.num_calls)


class Known(nn.Module):
    def __init__(self, reader: type[Reader], *, is_first: bool) -> None:
        super().__init__()
        writer = Writer()
        self.one: nn.Module = reader(writer) if is_first else writer
        self.other: nn.Module = writer if is_first else reader(writer)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.other(self.one(x)))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("reader", [Reader, BoundReader])
def test_attribute_of_a_module_elsewhere_is_read(reader: type[Reader], is_first: bool, num_ranks: int) -> None:
    plan = plan_of(num_ranks, "one", "other", "head")
    assert_same_as_plainly(lambda: Known(reader, is_first=is_first), train, num_ranks, plan=plan)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0, 0.5, 1.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask


class Holder(nn.Module):
    """Names by a plain attribute, and in a list, what a part of it has registered, as the blocks of MADE do."""

    def __init__(self, masked: Masked, *, is_own: bool) -> None:
        super().__init__()
        self.inner: nn.Module = masked if is_own else nn.Linear(8, 8)
        self.mask = masked.mask
        self.weights = [masked.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) * self.mask + self.weights[0].mean())


class Holders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        masked = Masked()
        self.one, self.other = Holder(masked, is_own=True), Holder(masked, is_own=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.other(self.one(x)))


@pytest.mark.parametrize("ranks", [(0, 0, 1), (0, 1, 0)])
def test_parameters_and_buffers_that_modules_hold_by_other_names_are_the_same_on_all_ranks(ranks: Any) -> None:
    plan = dict(zip(("one", "other", "head"), ranks, strict=True))
    assert_same_as_plainly(Holders, train, 2, plan=plan)


class Drawing(nn.Module):
    """Is called part by part: all ranks move its generator on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(8, 8), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + 0.1 * torch.rand(8, generator=self.generator)

    def __deepcopy__(self, memo: Any) -> Drawing:
        copy = Drawing()
        copy.load_state_dict(self.state_dict())
        return copy


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x)) / self.calls[0]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_count_is_recorded_behind_a_part_that_draws(num_ranks: int) -> None:
    def program(model: Any) -> Any:
        model(X).square().mean().backward()
        return model[2].calls.tolist(), [parameter.grad.tolist() for parameter in model.parameters()]

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Drawing(), Counting(), nn.Linear(8, 5))

    assert_same_as_plainly(build, program, num_ranks)

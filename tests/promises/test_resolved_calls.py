"""Calls whose result no run on fakes can foresee: the owner runs them, and all ranks get what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import SEQUENCES, X, assert_same_as_plainly, train
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import FarspanError
from farspan.execute.process.world import current_engine


class Routed(nn.Module):
    """Experts that see the tokens routed to them, as mixtures of experts do; all inside one module."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number in choice.unique().tolist():
            rows = torch.nonzero(choice == number).squeeze(1)
            out = out.index_add(0, rows, self.experts[number](x[rows]))
        return x + out


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Routed() for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Selects(nn.Module):
    """Rows chosen by value: another number in every micro-batch."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        rows = (x[:, 0] > x[:, 1]).nonzero().squeeze(1)
        return x[rows], rows, len(rows)


class Selected(nn.Module):
    """A changing shape over a border, and a number beside it that Python uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.first, self.selects = nn.Sequential(self.a, Selects()), Selects()

    def forward(self, x: Tensor) -> Tensor:
        some, rows, number = self.first(x)
        others, _, _ = self.selects(torch.tanh(self.b(some)))
        assert some.shape[0] == number and isinstance(number, int)
        y = self.c(x).index_add(0, rows, self.c(torch.tanh(self.b(some))) / max(number, 1))
        return y + others.sum()


class MaskedGlue(nn.Module):
    """Data-dependent shapes in a container's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        rows, columns = torch.nonzero(y > 0, as_tuple=True)
        extra = y[y > 0].mean() + y.masked_select(y < 0).sum() + columns.sum() / (rows.numel() + 1)
        return self.b(y) * extra


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([4, 3, 3, 2, 2, 1])
        packed = nn.utils.rnn.pack_padded_sequence(self.first(x), lengths, batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(out[:, 0] + out.sum(1))


class Notes:
    def __init__(self, values: np.ndarray[Any, Any], kind: type) -> None:
        self.values, self.kind = values, kind


class Reports(nn.Module):
    """Returns what only its data determine: numbers, an array, an object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        values = y.detach().numpy()
        return {"y": y, "notes": Notes(values.max(0), Notes), "mean": float(values.mean()), "big": (values > 1).any()}


class Reported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Reports() for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            found = part(x)
            assert found["notes"].kind is Notes and isinstance(found["mean"], float)
            x = found["y"] * found["mean"] + torch.from_numpy(found["notes"].values)
            if found["big"]:
                x = torch.tanh(x)
        return self.head(x)


class Converts(nn.Module):
    """Converts a part of itself while it runs, as the router of NLLB does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.gate = self.gate.to(x.dtype)
        return x * torch.sigmoid(self.gate(x))


class Converted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Converts() for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return self.head(x)


class Rereads(nn.Module):
    """Uses what it is given several times, and how often depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(3 + int(x.detach().sum() > 0)):
            y = torch.tanh(self.linear(y) + 0.3 * x)
        return y


class Reread(nn.Module):
    """What its first part gives is used by all others, and a part of a part is called apart from it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.parts = nn.ModuleList([Rereads() for _ in range(2)])
        self.last = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.first(x)
        y = memory
        for part in self.parts:
            y = y + part(memory)
        y = self.last(y * memory) + memory
        for part in self.parts:
            y = torch.tanh(part.get_submodule("linear")(y))
        return self.head(self.last(y))


class WithCtc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.b(torch.tanh(self.a(x))), -1)


def ctc(out: Tensor) -> Tensor:
    targets, lengths = torch.tensor([[1, 2], [3, 4], [1, 3], [2, 2], [4, 1], [1, 2]]), torch.full((6,), 2)
    return F.ctc_loss(out.transpose(0, 1), targets, torch.full((6,), 4), lengths.clamp(max=1))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("build", "program"),
    [
        (Experts, train),
        (Selected, train),
        (MaskedGlue, train),
        (Packed, lambda model: train(model, SEQUENCES)),
        (Reported, train),
        (Converted, train),
        (Reread, train),
        (WithCtc, lambda model: train(model, SEQUENCES, ctc)),
    ],
)
def test_same_as_plainly(build: Callable[[], nn.Module], program: Callable[[Any], Any], num_ranks: int) -> None:
    if num_ranks == 3 and build in (MaskedGlue, WithCtc):
        pytest.skip("two modules have no three stages")
    assert_same_as_plainly(build, program, num_ranks)


def test_what_gave_the_same_twice_is_not_run_ahead_a_third_time() -> None:
    models = [Experts() for _ in range(2)]

    def program(rank: int) -> list[int]:
        plan = {"layers.0": "rank:0", "layers.1": "rank:0", "layers.2": "rank:1", "head": "rank:1"}
        model = farspan.distribute(models[rank], plan=plan)
        engine = current_engine()
        assert engine is not None
        flushes = []
        for _ in range(5):
            before = engine.num_flushes
            model(X).sum().backward()
            flushes.append(engine.num_flushes - before)
            farspan.flush()
        return flushes

    first, second, *others = run_threads(2, program)[0]
    assert first > 0 and second > 0 and others == [0, 0, 0]


def noting() -> tuple[nn.Module, list[float]]:
    """Returns a model whose parts add what they compute to a list around their code, and may raise; and the list."""
    noted: list[float] = []

    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("calls", torch.zeros(()))
            self.calls: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = self.linear(x)
            noted.append(y.max().item())
            if noted[-1] > 100:
                raise ValueError("too large")
            return y

    torch.manual_seed(0)
    return nn.Sequential(*[Notes() for _ in range(3)]), noted


def test_what_a_call_adds_to_a_list_for_its_data_every_rank_sees_once() -> None:
    def program(model: Any, noted: list[float]) -> Any:
        results: list[Any] = []
        for factor in (1, 1000, 1, 1):
            try:
                loss = model(X * factor).square().mean()
                loss.backward()
                results.append(loss.item())
            except ValueError as error:
                results.append(str(error))
            results.append(len(noted))
        return results, noted, [item.tolist() for item in model.state_dict().values()]

    with torch.random.fork_rng():
        plain, *built = [noting() for _ in range(3)]
    wanted = program(*plain)
    assert "too large" in wanted[0]
    for got in run_threads(2, lambda rank: program(farspan.distribute(built[rank][0]), built[rank][1])):
        assert got == wanted


class Cut(nn.Module):
    """Gives twice the same shape, and then another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[: int(x[0, 0].item())]


def test_what_comes_otherwise_than_it_came_twice_is_a_named_error() -> None:
    models = [nn.Sequential(nn.Identity(), Cut(), nn.Linear(5, 5)) for _ in range(2)]

    def program(rank: int) -> None:
        model = farspan.distribute(models[rank])
        for size in (3, 3, 2):
            model(torch.full((6, 8), float(size))).sum().backward()
            farspan.flush()

    with pytest.raises(FarspanError, match=r"\[2, 5\].*predicted was float32\[3, 5\]"):
        run_threads(2, program)


def test_an_object_without_a_name_is_a_named_error() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Any:
            number = x.sum().item()
            return self.linear(x), lambda: number

    models = [nn.Sequential(nn.Linear(8, 8), Hidden()) for _ in range(2)]
    with pytest.raises(FarspanError, match="cannot be sent to the other ranks"):
        run_threads(2, lambda rank: farspan.distribute(models[rank])(X))


class Carries(nn.Module):
    """A cell whose state goes on to the next call, in a module of which data decide what it calls."""

    def __init__(self, *, is_cut: bool) -> None:
        super().__init__()
        self.cell, self.parts, self.is_cut = (
            nn.GRUCell(8, 8),
            nn.ModuleList([nn.Linear(8, 8) for _ in range(2)]),
            is_cut,
        )
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape) if self.state is None else self.state
        self.state = self.cell(x, state.detach() if self.is_cut else state)
        return self.parts[int(x.sum() > 0)](self.state)


def carrying(*, is_cut: bool) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 8), Carries(is_cut=is_cut), nn.Linear(8, 5))


def train_carrying(model: Any) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(2):
        for number in range(3):
            model(X - step + number).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


_IN_ONE = {"0": "rank:0", "1": "rank:1", "2": "rank:0"}


def test_a_state_that_is_cut_may_be_carried_past_a_backward() -> None:
    models = [carrying(is_cut=True) for _ in range(3)]
    plain = train_carrying(models[2])
    assert run_threads(2, lambda rank: train_carrying(farspan.distribute(models[rank], plan=_IN_ONE))) == [plain] * 2


def test_gradient_to_a_state_from_before_a_backward_is_torchs_error() -> None:
    models = [carrying(is_cut=False) for _ in range(2)]
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        run_threads(2, lambda rank: train_carrying(farspan.distribute(models[rank], plan=_IN_ONE)))


class CountsLate(nn.Module):
    """Counts where data want it: not in its first calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 100:
            self.count += 1
        return self.linear(x)


def test_an_attribute_that_is_changed_first_in_a_later_call_is_a_named_error() -> None:
    def program(rank: int) -> None:
        model = farspan.distribute(models[rank], plan=_IN_ONE)
        for size in (0.0, 0.0, 0.0, 9.0):
            model(torch.full((6, 8), size)).sum().backward()
            farspan.flush()

    models = [nn.Sequential(nn.Identity(), CountsLate(), nn.Linear(8, 5)) for _ in range(2)]
    with pytest.raises(FarspanError, match=r"1: its call changes CountsLate.count, and did not in its first calls"):
        run_threads(2, program)

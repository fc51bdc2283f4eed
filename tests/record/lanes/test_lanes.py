"""`distribute(model, micro_batches=4)`: a plain loop's batch in lanes, with the gradients of the whole batch."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.lanes.models import CASES
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.errors import PlanError, RecordError
from farspan.execute.process.world import current_engine

REFUSED = {"written_in_place_under_a_view"}


torch.manual_seed(0)
_BUILT = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))


def _model() -> nn.Sequential:
    return copy.deepcopy(_BUILT)


def _batch(rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 5, (rows,), generator=generator)


def _gradients(model: nn.Module) -> list[Any]:
    return [None if item.grad is None else torch.tensor(item.grad.tolist()) for item in model.parameters()]


def _num_micro_batches() -> int:
    step = farspan.last_step()
    assert step is not None
    return step.num_micro_batches


@pytest.mark.parametrize(
    "name",
    CASES,
)
def test_an_awkward_model_has_the_gradients_of_the_whole_batch(name: str) -> None:
    torch.manual_seed(0)
    model, step = CASES[name]()
    plain = copy.deepcopy(model)
    for _ in range(2):
        step(plain).backward()
    expected = _gradients(plain)

    def program(rank: int) -> Any:
        own = copy.deepcopy(model)
        farspan.distribute(own, micro_batches=4)
        try:
            for _ in range(2):
                step(own).backward()
        except RecordError as error:
            return error.what
        return _gradients(own)

    for found in run_threads(2, program):
        if name in REFUSED:
            assert "writes into a tensor of the whole batch" in found
            continue
        assert [item is None for item in found] == [item is None for item in expected]
        pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a is not None]
        size = max(float(a.norm()) for a, _ in pairs)
        assert all(float((a - b).norm()) <= 1e-5 * size for a, b in pairs)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_plain_loop_trains_as_with_the_whole_batch(num_ranks: int) -> None:
    """Everything that a loop looks at: losses, accuracy, norms, parameters after several steps; and lanes there are."""

    def train(model: nn.Module) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen: list[Any] = []
        for number in range(4):
            x, y = _batch(12 + number)
            optimizer.zero_grad()
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            accuracy = (logits.argmax(-1) == y).float().mean()
            seen += [loss.item(), float(norm), accuracy.item()]
        return [*seen, *[item.detach().sum().item() for item in model.parameters()]]

    expected = train(_model())

    def program(rank: int) -> Any:
        model = farspan.distribute(_model(), micro_batches=4)
        return train(model), _num_micro_batches()

    for found, number in run_threads(num_ranks, program):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert number == 4


class _Beside(nn.Module):
    """Has a mask beside its parts, which lie on several stages; one that counts its calls there, too."""

    mask: torch.Tensor
    same: torch.Tensor
    calls: torch.Tensor

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.body, self.counts = _model(), counts
        self.register_buffer("mask", torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.5]))
        self.register_buffer("same", self.mask)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        if self.counts:
            self.calls.add_(1)
        return self.body(x * self.mask + self.same)


@pytest.mark.parametrize("counts", [False, True])
def test_a_buffer_that_every_rank_has_is_no_reason_unless_it_is_written(counts: bool) -> None:
    plain = _Beside(counts=counts)
    x, y = _batch()
    F.cross_entropy(plain(x), y).backward()
    expected = _gradients(plain)

    def program(rank: int) -> Any:
        own = farspan.distribute(_Beside(counts=counts), micro_batches=4)
        F.cross_entropy(own(x), y).backward()
        return _gradients(own), own.calls.item(), _num_micro_batches()

    for found, calls, number in run_threads(2, program):
        assert (calls, number) == ((1.0, 1) if counts else (0.0, 4))
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, expected, strict=True))


def test_a_buffer_of_other_shapes_is_looked_at_again() -> None:
    masks = [torch.ones(6), torch.rand(12, 6), torch.rand(1, 6)]
    plain, (x, y) = _Beside(counts=False), _batch()
    expected: list[float] = []
    for mask in masks:
        plain.mask = mask
        expected.append(F.cross_entropy(plain(x), y).item())

    def program(rank: int) -> Any:
        own = farspan.distribute(_Beside(counts=False), micro_batches=4)
        found: list[tuple[float, int]] = []
        for mask in masks:
            own.mask = mask
            loss = F.cross_entropy(own(x), y)
            loss.backward()
            found.append((loss.item(), _num_micro_batches()))
        return found

    for found in run_threads(2, program):
        assert [loss for loss, _ in found] == pytest.approx(expected, rel=1e-5)
        assert [number for _, number in found] == [4, 1, 4]


def test_two_runs_are_the_same_to_the_last_bit() -> None:
    def program(rank: int) -> Any:
        model = farspan.distribute(_model(), micro_batches=4)
        x, y = _batch()
        for _ in range(3):
            F.cross_entropy(model(x), y).backward()
        return [item.tolist() for item in _gradients(model)]

    first, second = run_threads(2, program), run_threads(2, program)
    assert first == second
    assert first[0] == first[1]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)), "buffers"),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False)), "batch_norm"),
    ],
)
def test_what_cannot_be_cut_stays_whole_to_the_last_bit_and_says_why(make: Any, reason: str) -> None:
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    x, _ = _batch()
    plain(x).square().mean().backward()
    expected = [item.tolist() for item in (*_gradients(plain), *plain.buffers())]

    def program(rank: int) -> Any:
        own = copy.deepcopy(model)
        farspan.distribute(own, micro_batches=4)
        own(x).square().mean().backward()
        engine = current_engine()
        assert engine is not None
        said = [*engine.recorder.batches.models[id(own)].reasons]
        return [item.tolist() for item in (*_gradients(own), *own.buffers())], said

    for found, said in run_threads(2, program):
        assert found == expected
        assert len(said) == 1
        assert reason in said[0]


def test_an_examination_leaves_no_trace() -> None:
    """It runs the model several times: no attribute, generator, gradient or number of a step may show that."""

    def program(rank: int) -> Any:
        torch.manual_seed(3)
        model = farspan.distribute(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5)), micro_batches=4)
        x, _ = _batch()
        before = torch.get_rng_state()
        out = model(x)
        gradients = [item.grad is None for item in model.parameters()]
        training = [module.training for module in model.modules()]
        out.square().mean().backward()
        _gradients(model)
        moved = torch.get_rng_state()
        torch.set_rng_state(before)
        torch.empty(12, 8).bernoulli_(0.5)  # what one pass draws
        return all(gradients), all(training), torch.equal(moved, torch.get_rng_state())

    assert run_threads(1, program) == [(True, True, True)]


def test_evaluation_and_small_batches_stay_whole() -> None:
    def program(rank: int) -> Any:
        model = farspan.distribute(_model(), micro_batches=4)
        x, y = _batch()
        with torch.no_grad():
            whole = model(x).tolist()
        model.eval()
        F.cross_entropy(model(x), y).backward()
        _gradients(model)
        in_eval = _num_micro_batches()
        model.train()
        F.cross_entropy(model(x[:1]), y[:1]).backward()
        _gradients(model)
        return whole, in_eval, _num_micro_batches()

    plain = _model()(_batch()[0]).tolist()
    assert run_threads(2, program) == [(plain, 1, 1)] * 2


def test_outputs_are_read_before_and_after_the_backward() -> None:
    def program(rank: int) -> Any:
        model = farspan.distribute(_model(), micro_batches=4)
        x, y = _batch()
        out = model(x)
        shape, first = tuple(out.shape), out[0].tolist()
        loss = F.cross_entropy(out, y)
        loss.backward()
        kept = loss.detach()
        return shape, first, out.tolist(), kept.item() == loss.item(), f"{loss:.3f}", repr(out.detach())

    plain = _model()(_batch()[0])
    for shape, first, whole, is_same, text, shown in run_threads(2, program):
        assert shape == (12, 5)
        assert first == pytest.approx(plain[0].tolist(), rel=1e-5)
        assert whole == [pytest.approx(row, rel=1e-4, abs=1e-6) for row in plain.tolist()]
        assert is_same
        assert text == f"{F.cross_entropy(plain, _batch()[1]).item():.3f}"
        assert shown.startswith("tensor(")


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "many"])
def test_what_is_no_number_of_micro_batches_is_refused(wrong: Any) -> None:
    def program(rank: int) -> None:
        with pytest.raises(PlanError, match="is no number of micro-batches"):
            farspan.distribute(_model(), micro_batches=wrong)

    run_threads(1, program)


class _Masked(nn.Module):
    """Looks at its mask only where that masks something, as models do that save work."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if not bool(mask.all()):
            y = y * mask
        return self.second(y)


def test_a_model_that_looks_at_the_data_of_its_batch_stays_whole() -> None:
    """What it does for a batch in which nothing is masked says nothing of what it does for its parts, or for others."""
    torch.manual_seed(0)
    model = _Masked()
    plain = copy.deepcopy(model)
    x, _ = _batch(8)
    masks = [torch.ones(8, 8), torch.ones(8, 8), (torch.rand(8, 8) > 0.5).float()]

    def train(each: nn.Module) -> list[Any]:
        for mask in masks:
            each(x, mask).square().mean().backward()
        return _gradients(each)

    expected = train(plain)

    def program(rank: int) -> Any:
        own = copy.deepcopy(model)
        farspan.distribute(own, micro_batches=4)
        found = train(own)
        engine = current_engine()
        assert engine is not None
        return found, [*engine.recorder.batches.models[id(own)].reasons]

    for found, said in run_threads(2, program):
        assert len(said) == 1
        assert "reads data" in said[0]
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b)


class _Settling(nn.Module):
    """Sets an attribute in its first call, as models do that find out what kind of task it is."""

    def __init__(self, *, is_settling: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)
        self.is_settling, self.kind = is_settling, 0

    def forward(self, x: torch.Tensor, seen: list[int] | None = None) -> torch.Tensor:
        if self.kind == 0 or not self.is_settling:
            self.kind += 1
        if seen is not None:
            seen.append(self.kind)
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("is_settling", [True, False])
def test_attributes_that_only_a_first_call_sets_are_no_reason_to_stay_whole(is_settling: bool) -> None:
    model = _Settling(is_settling=is_settling)
    x, _ = _batch()

    def program(rank: int) -> Any:
        own = copy.deepcopy(model)
        farspan.distribute(own, micro_batches=4)
        numbers: list[int] = []
        for _ in range(3):
            own(x).square().mean().backward()
            _gradients(own)
            numbers.append(_num_micro_batches())
        return numbers, own.kind

    assert run_threads(2, program) == [([1, 4, 4], 1) if is_settling else ([1, 1, 1], 3)] * 2


def test_a_list_that_the_program_gives_is_changed_as_by_the_whole_batch() -> None:
    model = _Settling(is_settling=True)
    x, _ = _batch()

    def program(rank: int) -> Any:
        own = copy.deepcopy(model)
        farspan.distribute(own, micro_batches=4)
        seen: list[int] = []
        for _ in range(3):
            own(x, seen).square().mean().backward()
            _gradients(own)
        return seen

    assert run_threads(2, program) == [[1, 1, 1]] * 2


def test_a_model_whose_parts_are_called_by_themselves_says_that_nothing_is_cut() -> None:
    def program(rank: int) -> list[str]:
        own = _model()
        farspan.distribute(own, micro_batches=4)
        x, _ = _batch()
        for _ in range(2):
            own[2:](own[:2](x).detach()).sum().backward()
            own[0](x).sum().backward()
        engine = current_engine()
        assert engine is not None
        return [*engine.recorder.batches.models[id(own)].reasons]

    for said in run_threads(2, program):
        (line,) = said
        assert re.fullmatch(
            r"parts of the model are called by themselves: 0 \(Linear\) at .*test_lanes.py:\d+, in .*", line
        )


def test_a_loss_that_takes_the_type_of_another_tensor_is_rounded_once() -> None:
    def program(rank: int) -> tuple[int, int]:
        own = _model()
        plain = copy.deepcopy(own)
        farspan.distribute(own, micro_batches=4)
        x, _ = _batch()
        counts = torch.zeros((), dtype=torch.long)
        return plain(x).square().sum().to(counts).item(), own(x).square().sum().to(counts).item()

    for expected, found in run_threads(2, program):
        assert found == expected

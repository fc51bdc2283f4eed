"""Batches that one rank alone has read: `farspan.from_rank`."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import SEQUENCES, X, Y, assert_same_as_plainly
from tests.support.ranks import run_processes, run_threads
from torch import Tensor, nn

import farspan
from farspan.comm.channels import Channels
from farspan.errors import DivergenceError, FarspanError, PlanError, RecordError
from farspan.execute.engine import Engine
from farspan.execute.process.world import current_engine
from farspan.record.tensor import LazyTensor

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "one_reader.py"


def engine() -> Engine:
    found = current_engine()
    assert found is not None
    return found


def read_by(rank: int, read: Callable[[], Any]) -> Any:
    """What `read` gives; over several ranks only `rank` calls it."""
    if threading.current_thread() is threading.main_thread():
        return read()
    rank = min(rank, engine().num_ranks - 1)
    return farspan.from_rank(rank, read() if engine().rank == rank else None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
            if mask is not None:
                x = torch.where(mask, x, 0.0)
        return self.head(x)


def plan_for(num_ranks: int) -> dict[str, str]:
    parts = ["embed", "layers.0", "layers.1", "layers.2", "head"]
    return {part: f"rank:{number * num_ranks // len(parts)}" for number, part in enumerate(parts)}


class Pair(NamedTuple):
    labels: Tensor
    weight: float


@dataclass
class Batch:
    inputs: dict[str, Any]
    targets: Pair
    names: list[str]
    number: int


def batches() -> Iterator[Batch]:
    """Integers, labels, a mask, plain values; the last one is smaller."""
    generator = torch.Generator().manual_seed(5)
    for number in range(6):
        size = 6 if number < 5 else 4
        x = torch.randn(size, 8, generator=generator)
        inputs = {
            "x": x,
            "rest": [torch.randint(7, (size,), generator=generator), x[:, :1] > -0.5],
            "same": x,
        }
        labels = torch.randint(5, (size,), generator=generator, dtype=torch.int32)
        yield Batch(inputs, Pair(labels, 0.5 + number), ["a", f"b{number}"], number)


def train(model: Any, *, reader: int = 0) -> Any:
    """Three steps of two micro-batches, as one rank reads them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = batches()
    result: list[Any] = []
    for _ in range(3):
        optimizer.zero_grad()
        losses = []
        for _ in range(2):
            batch = read_by(reader, lambda: next(source))
            ids, mask = batch.inputs["rest"]
            assert batch.inputs["same"] is batch.inputs["x"] and batch.names == ["a", f"b{batch.number}"]
            out = model(batch.inputs["x"], ids, mask)
            loss = F.cross_entropy(out, batch.targets.labels.long()) * batch.targets.weight
            loss.backward()
            losses.append(loss)
        gradients = [p.grad.tolist() for p in model.parameters()]
        optimizer.step()
        result.append((gradients, [loss.item() for loss in losses], batch.number, len(batch.inputs["x"])))
    return result, {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("reader", [0, 2])
def test_one_rank_reads_for_all(reader: int, num_ranks: int) -> None:
    assert_same_as_plainly(Net, lambda model: train(model, reader=reader), num_ranks, plan=plan_for(num_ranks))


def split(model: Any) -> Any:
    """One batch read once, cut into micro-batches by the loop, used in two steps, and looked at after."""
    batch = read_by(1, lambda: {"x": X, "ids": torch.arange(6), "y": Y})
    losses = []
    for _ in range(2):
        for x, ids, y in zip(*(batch[name].chunk(2) for name in ("x", "ids", "y")), strict=True):
            loss = F.cross_entropy(model(x, ids), y)
            loss.backward()
            losses.append(loss)
        farspan.flush()
    with torch.no_grad():
        accuracy = (model(batch["x"], batch["ids"]).argmax(1) == batch["y"]).float().mean()
    gradients = [p.grad.tolist() for p in model.parameters()]
    return [loss.item() for loss in losses], accuracy.item(), gradients, batch["y"].tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_batch_is_cut_by_the_loop(num_ranks: int) -> None:
    assert_same_as_plainly(Net, split, num_ranks, plan=plan_for(num_ranks))


def in_place(model: Any) -> Any:
    """The program writes into its batch; the reader's own tensors stay."""
    own = X.clone()
    batch = read_by(0, lambda: [own.clone()])
    x = batch[0]
    x.mul_(2)
    x[0] = 1.0
    model(x, torch.arange(6)).square().mean().backward()
    return x.tolist(), [p.grad.tolist() for p in model.parameters()]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_batch_can_be_written_to_by_all(num_ranks: int) -> None:
    assert_same_as_plainly(Net, in_place, num_ranks, plan=plan_for(num_ranks))


def test_any_rank_can_read_an_input_and_alone() -> None:
    """Before anything runs, after it ran, on one rank alone; what is dropped is let go."""
    models = [Net() for _ in range(3)]

    def program(rank: int) -> Any:
        model = farspan.distribute(models[rank], plan=plan_for(3))
        kept = engine().values._kept
        first = farspan.from_rank(2, {"x": X, "n": Y} if rank == 2 else None)
        assert isinstance(first["x"], LazyTensor) and engine().num_flushes == 0
        numbers = [first["n"][1].item()]
        if rank == 1:
            assert first["x"].tolist() == X.tolist()
        model(first["x"], first["n"]).sum().backward()
        farspan.flush()
        if rank != 2:
            assert first["n"].tolist() == Y.tolist() and first["x"]._value.data is None
        numbers += [int(first["n"].sum()), float(first["x"][0, 0])]
        num_kept = []
        for _ in range(3):
            first = farspan.from_rank(2, {"x": X.clone()} if rank == 2 else None)
            num_kept.append(sum(value.call is None for value in kept.values()))
        return numbers, num_kept

    results = run_threads(3, program)
    assert all(numbers == [Y[1].item(), Y.sum().item(), X[0, 0].item()] for numbers, _ in results)
    assert results[2][1] == [3, 2, 2] and results[0][1] == [0, 0, 0]


def test_data_go_only_where_they_are_consumed_and_nothing_runs_early(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int, list[tuple[int, ...]]]] = []
    send = Channels.send

    def sending(self: Channels, message: Any, tensors: Any, metas: Any) -> None:
        if message.task == -1:
            sent.append((self.rank, message.dst, sorted(meta.shape for meta in metas)))
        send(self, message, tensors, metas)

    monkeypatch.setattr(Channels, "send", sending)
    models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)) for _ in range(3)]

    def program(rank: int) -> list[int]:
        model = farspan.distribute(models[rank], plan={str(number): f"rank:{number}" for number in range(3)})
        for _ in range(4):
            batch = farspan.from_rank(0, {"x": X, "y": Y, "extra": SEQUENCES} if rank == 0 else None)
            F.cross_entropy(model(batch["x"]), batch["y"]).backward()
        before = engine().num_flushes
        farspan.flush()
        step = farspan.last_step()
        assert step is not None
        return [before, engine().num_flushes, step.num_micro_batches]

    assert run_threads(3, program) == [[0, 1, 4]] * 3
    assert sent == [(0, 2, [(6,)] * 4)]  # the labels; x is used at home, the rest nowhere


def test_a_batch_can_come_before_the_model() -> None:
    """Also from a rank of which no stage is known yet; and distribute's seed counts all the same."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 5))

    def losses(*, is_early: bool, seed: int) -> list[tuple[float, list[int]]]:
        models = [copy.deepcopy(model) for _ in range(2)]

        def program(rank: int) -> tuple[float, list[int]]:
            x, y = farspan.from_rank(1, (X, Y) if rank == 1 else None) if is_early else (X, Y)
            plan = {"0": "rank:0", "1": "rank:1", "2": "rank:1"}
            loss = F.cross_entropy(farspan.distribute(models[rank], plan=plan, seed=seed)(x), y)
            loss.backward()
            return loss.item(), [team.leader.rank for team in engine().teams]

        return run_threads(2, program)

    early, late, other = (losses(is_early=early, seed=seed) for early, seed in ((True, 3), (False, 3), (True, 4)))
    assert [ranks for _, ranks in early] == [[1, 0]] * 2 and [ranks for _, ranks in late] == [[0, 1]] * 2
    assert {loss for loss, _ in early} == {loss for loss, _ in late} != {loss for loss, _ in other}


def test_plain_values_of_all_kinds_arrive() -> None:
    wanted = {
        1: [None, True, 2**70, -1.5, float("inf"), 1j, b"\x00\xff", "text", ..., range(3), slice(1, None)],
        "shape": torch.Size([2, 3]),
        "kinds": (torch.float16, torch.device("cpu"), int, Batch),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "set": {1, 2},
        (1, "key"): Pair(torch.zeros(0, 3), 2.0),
    }

    def program(rank: int) -> None:
        model = nn.Linear(2, 2)
        farspan.distribute(model, plan={"weight": "rank:0", "bias": "rank:1"})
        got = farspan.from_rank(1, wanted if rank == 1 else None)
        assert list(got) == list(wanted) and got["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
        for key in (1, "shape", "kinds", "set"):
            assert got[key] == wanted[key] and type(got[key]) is type(wanted[key])
        pair = got[1, "key"]
        assert type(pair) is Pair and pair.labels.shape == (0, 3) and pair.labels.tolist() == [] and pair.weight == 2.0

    run_threads(2, program)


class Subclass(torch.Tensor):
    pass


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: {"x": torch.zeros(2, requires_grad=True)}, r"float32\[2\] requires grad"),
    (lambda: torch.eye(3).to_sparse(), "sparse"),
    (lambda: [torch.zeros(2).as_subclass(Subclass)], "class Subclass"),
    (lambda: {"collate": lambda items: items}, "a function cannot be sent"),
]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("batch", "words"), REFUSED)
def test_what_cannot_be_sent_is_the_same_error_on_every_rank(
    batch: Callable[[], Any], words: str, num_ranks: int
) -> None:
    def program(rank: int) -> str:
        with pytest.raises(RecordError, match=words) as caught:
            farspan.from_rank(0, batch() if rank == 0 else None)
        assert caught.value.why and caught.value.hint and "test_inputs.py" in caught.value.why
        assert farspan.from_rank(0, 7 if rank == 0 else None) == 7  # and all can go on
        return str(caught.value)

    assert len(set(run_threads(num_ranks, program))) == 1


def test_a_recorded_tensor_is_refused() -> None:
    def program(rank: int) -> None:
        first = farspan.from_rank(0, X if rank == 0 else None)
        with pytest.raises(RecordError, match="recorded already"):
            farspan.from_rank(0, [first + 1])

    run_threads(2, program)


@pytest.mark.parametrize("rank", [2, -1, "0", True])
def test_no_such_rank_is_a_named_error(rank: Any) -> None:
    def program(_: int) -> None:
        with pytest.raises(PlanError, match=r"farspan\.from_rank: ") as caught:
            farspan.from_rank(rank, X)
        assert caught.value.why and caught.value.hint

    run_threads(2, program)
    run_threads(1, program)


def test_each_rank_naming_itself_is_a_named_error() -> None:
    with pytest.raises(DivergenceError, match="for different ranks"):
        run_threads(2, lambda rank: farspan.from_rank(rank, X))


def test_ranks_that_use_different_inputs_are_a_named_error() -> None:
    def program(rank: int) -> None:
        model = farspan.distribute(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)))
        first, second = (farspan.from_rank(0, X + n if rank == 0 else None) for n in range(2))
        model(first if rank == 0 else second).sum().backward()
        farspan.flush()

    with pytest.raises(DivergenceError):
        run_threads(2, program)


def test_a_write_before_the_step_is_a_named_error() -> None:
    def program(rank: int) -> None:
        model = farspan.distribute(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)))
        own = X.clone()
        batch = farspan.from_rank(0, own if rank == 0 else None)
        model(batch).sum().backward()
        own.zero_()
        farspan.flush()

    with pytest.raises(FarspanError, match=r"float32\[6, 8\] given to farspan.from_rank has been written to since"):
        run_threads(2, program)


def test_a_tensor_of_inference_mode_can_be_trained_on() -> None:
    def program(rank: int) -> float:
        model = farspan.distribute(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)))
        with torch.inference_mode():
            own = X * 1
        model(farspan.from_rank(0, own if rank == 0 else None)).sum().backward()
        farspan.flush()
        return 1.0

    assert run_threads(2, program) == [1.0, 1.0]


def test_one_reader_over_two_processes() -> None:
    """A shuffling loader on rank 0 alone draws random numbers; the model draws later, alike on all ranks."""
    alone = run_processes(1, PROGRAM)
    both = run_processes(2, PROGRAM)
    for item in (*alone, *both):
        assert item.code == 0, item.stderr
    wanted = json.loads(alone[0].stdout.splitlines()[-1])
    assert [json.loads(item.stdout.splitlines()[-1]) for item in both] == [wanted, wanted]


def test_what_was_given_may_be_written_after_its_step_has_been_recorded() -> None:
    def program(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            batch = (X + number).clone()
            if is_given:
                batch = farspan.from_rank(0, batch if farspan.rank() == 0 else None)
            assert batch is not None
            model(batch).square().sum().backward()
            batch.zero_()
        optimizer.step()
        return batch.tolist(), {name: tensor.tolist() for name, tensor in model.state_dict().items()}

    models, is_given = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)) for _ in range(3)], False
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    plain, is_given = program(models.pop()), True
    assert run_threads(2, lambda rank: program(farspan.distribute(models[rank]))) == [plain] * 2

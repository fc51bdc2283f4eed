"""Modules that do something on their way that a run on fakes would do once more: they do it as often as in one process,
with the same numbers."""

from __future__ import annotations

import collections
import contextvars
import copy
import decimal
import queue
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.support.around_tanh import Tanh, built, train
from tests.support.ranks import run_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farspan
from farspan.errors import RecordError
from farspan.record import recorder
from farspan.record.surgery.opened import call_parts

STEP = contextvars.ContextVar("step", default=0)


class Counts(Tanh):
    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls.sum()


class CountsInAView(Tanh):
    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            self.calls[1] += 1
        return super().forward(x) * self.calls[1]


class CountsOnATensor(Tanh):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = torch.ones(2)
        self.scale.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.scale.calls += 1
        return super().forward(x) * self.scale.calls


class CountsInAContext(Tanh):
    def forward(self, x: Tensor) -> Tensor:
        STEP.set(STEP.get() + 1)
        return super().forward(x) * STEP.get()


class CountsInAContextAndByData(CountsInAContext):
    """No run on fakes comes to its end, and a real one would have written."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.calls.add_(1)
        return y if self.calls % 2 else -y


class CountsByData(Tanh):
    """Counts in a list of the file's, which only data show."""

    counts: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        if self.calls > 0:
            self.counts.append(1)
        return super().forward(x) / len(self.counts)


class Rounds(Tanh):
    """Python keeps the way of rounding in a context variable, which is set when it is first asked for."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(decimal.Decimal(1) / decimal.Decimal(4))


class TakesInTurn(Tanh):
    def __init__(self) -> None:
        super().__init__()
        self.scales = collections.OrderedDict(a=1.0, b=2.0, c=3.0)

    def forward(self, x: Tensor) -> Tensor:
        self.scales.move_to_end(next(iter(self.scales)))
        return super().forward(x) * next(iter(self.scales.values()))


class AppendsByAMethod(Tanh):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []
        self.note = self.log.append

    def forward(self, x: Tensor) -> Tensor:
        self.note(1)
        return super().forward(x) * len(self.log)


class TakesFromAQueue(Tanh):
    """An object that holds a lock, and methods of it, more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: queue.Queue[float] = queue.Queue()
        self.scales.put(1.0)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scales.get()
        self.scales.put(scale + 1)
        return super().forward(x) * scale


class Prints(Tanh):
    def forward(self, x: Tensor) -> Tensor:
        print("a line of the module")
        return super().forward(x)


class PrintsQuietly(Tanh):
    """Its own code catches all errors."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            print("a line of the module")
        except Exception:
            return x
        return super().forward(x)


class Writes(Tanh):
    path: Path

    def forward(self, x: Tensor) -> Tensor:
        with self.path.open("a") as file:
            file.write("x")
        return super().forward(x)


COUNTS_IN_A_CONTEXT = [CountsInAContext, CountsInAContextAndByData]


@pytest.mark.parametrize(
    "kind",
    [Counts, CountsInAView, CountsOnATensor, *COUNTS_IN_A_CONTEXT, TakesInTurn, AppendsByAMethod, TakesFromAQueue],
)
def test_what_a_module_counts_is_counted_once_a_call(kind: type[Tanh]) -> None:
    plain = contextvars.copy_context().run(train, built(kind))

    models = [built(kind) for _ in range(2)]

    def program(rank: int) -> list[float]:
        return contextvars.copy_context().run(train, farspan.distribute(models[rank]))

    assert run_threads(2, program) == [plain] * 2


def test_a_module_that_writes_and_then_counts_around_itself_for_its_data_is_an_error() -> None:
    models = [built(CountsByData) for _ in range(2)]
    with pytest.raises(RecordError, match="1 writes into a tensor, and it changes counts outside the module"):
        run_threads(2, lambda rank: train(farspan.distribute(models[rank])))


@pytest.mark.parametrize("kind", [Prints, PrintsQuietly])
def test_a_line_is_printed_once_a_call_on_each_rank(kind: type[Tanh], capsys: pytest.CaptureFixture[str]) -> None:
    plain = train(built(kind))
    assert capsys.readouterr().out.count("a line") == 4
    models = [built(kind) for _ in range(2)]
    assert run_threads(2, lambda rank: train(farspan.distribute(models[rank]))) == [plain] * 2
    assert capsys.readouterr().out.count("a line") == 8


def test_variables_of_libraries_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> list[float]:
        return contextvars.Context().run(train, farspan.distribute(models.pop()))

    models = [built(Rounds) for _ in range(3)]
    plain = train(models.pop())
    opened: list[Any] = []
    monkeypatch.setattr(recorder, "call_parts", lambda *args: opened.append(args) or call_parts(*args))
    assert run_threads(2, lambda _: program()) == [plain] * 2
    assert not opened


class CountsAround(Tanh):
    """Counts in a variable around a function."""

    def __init__(self) -> None:
        super().__init__()
        count = 0

        def counted() -> int:
            nonlocal count
            count += 1
            return count

        self.counted = counted

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.counted()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_plain_tensor_that_becomes_a_recorded_one_is_not_put_back(num_ranks: int) -> None:
    def program(model: Any) -> Any:
        return train(model), model[1].calls.tolist()

    models = [nn.Sequential(nn.Linear(4, 4), Counts(), CountsAround(), nn.Linear(4, 4)) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    plain = program(models.pop())
    assert run_threads(num_ranks, lambda rank: program(farspan.distribute(models[rank]))) == [plain] * num_ranks


def test_whether_a_batch_can_be_cut_is_found_out_without_counting() -> None:
    def program(model: Any) -> Any:
        return train(model), model[1].calls.tolist()

    models = [built(Counts) for _ in range(3)]
    plain = program(models.pop())
    assert run_threads(2, lambda rank: program(farspan.distribute(models[rank], micro_batches=2))) == [plain] * 2


def test_a_file_is_written_to_once_a_call_on_each_rank(tmp_path: Path) -> None:
    names = ("0", "1", "plain")
    models: list[Any] = [built(Writes) for _ in names]
    for model, name in zip(models, names, strict=True):
        model[1].path = tmp_path / name
    plain = train(models[2])
    assert run_threads(2, lambda rank: train(farspan.distribute(models[rank]))) == [plain] * 2
    assert [(tmp_path / name).read_text() for name in names] == ["xxxx"] * 3


class Part(nn.Module):
    """A checkpoint around what lies on two stages."""

    def __init__(self, inner: nn.Module, *, is_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.last, self.is_reentrant = inner, nn.Linear(4, 4), is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.both, x, use_reentrant=self.is_reentrant)

    def both(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


class Averages(Tanh):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return super().forward(x) - self.mean


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (CountsInAContext, "1.inner prints, writes into a file, or sets a variable around it in a checkpoint"),
        (Averages, "its buffers or attributes would count twice"),
        (TakesInTurn, "its buffers or attributes would count twice"),
    ],
)
def test_what_a_checkpoint_over_stages_would_do_twice_is_an_error(
    kind: type[Tanh], what: str, *, is_reentrant: bool
) -> None:
    plan = {"0": "rank:0", "1.inner": "rank:0", "1.last": "rank:1"}
    models = [nn.Sequential(nn.Linear(4, 4), Part(kind(), is_reentrant=is_reentrant)) for _ in range(2)]
    with pytest.raises(RecordError, match=what):
        run_threads(2, lambda rank: train(farspan.distribute(models[rank], plan=plan)))


class Warms(nn.Module):
    """Counts in a buffer that no gradient goes through, and does something else after its third call."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.both, x, use_reentrant=False)

    def both(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.first(x) if self.calls < 4 else self.last(x))


def test_a_count_that_decides_in_a_checkpoint_over_stages_is_an_error() -> None:
    """It was one too low: nothing went back through the call that counts."""
    plan = {"0": "rank:0", "1.first": "rank:0", "1.last": "rank:1"}
    models = [nn.Sequential(nn.Linear(4, 4), Warms()) for _ in range(2)]
    with pytest.raises(RecordError, match=r"writes into a tensor of its own \(calls\) in a checkpoint whose parts"):
        run_threads(2, lambda rank: train(farspan.distribute(models[rank], plan=plan)))


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_over_stages_that_changes_nothing_is_recorded(*, is_reentrant: bool) -> None:
    torch.manual_seed(0)
    plan = {"0": "rank:0", "1.inner": "rank:0", "1.last": "rank:1"}
    model = nn.Sequential(nn.Linear(4, 4), Part(Tanh(), is_reentrant=is_reentrant))
    models = [copy.deepcopy(model) for _ in range(2)]
    assert run_threads(2, lambda rank: train(farspan.distribute(models[rank], plan=plan))) == [train(model)] * 2


class Means(nn.Module):
    """Keeps a mean beside its output, of this call alone or of all."""

    def __init__(self, *, is_running: bool) -> None:
        super().__init__()
        self.first, self.last, self.is_running = nn.Linear(4, 4), nn.Linear(4, 4), is_running
        self.mean = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.both, x, use_reentrant=False)

    def both(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        mean = hidden.detach().mean()
        self.mean = 0.5 * self.mean + mean if self.is_running else mean
        return self.last(hidden)


@pytest.mark.parametrize("is_running", [False, True])
def test_an_attribute_may_be_set_anew_in_a_checkpoint_and_not_rest_on_what_it_was(*, is_running: bool) -> None:
    plan = {"0": "rank:0", "1.first": "rank:0", "1.last": "rank:1"}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Means(is_running=is_running))
    models = [copy.deepcopy(model) for _ in range(2)]

    def program(model: Any) -> Any:
        return train(model), model[1].mean.item()

    if is_running:
        with pytest.raises(RecordError, match="a Means changes its attribute mean in a checkpoint"):
            run_threads(2, lambda rank: program(farspan.distribute(models[rank], plan=plan)))
    else:
        plain = program(model)
        assert run_threads(2, lambda rank: program(farspan.distribute(models[rank], plan=plan))) == [plain] * 2


def test_a_checkpoint_of_a_plain_model_beside_a_distributed_one_is_its_own_affair() -> None:
    models = [built(Tanh) for _ in range(2)]
    torch.manual_seed(0)
    beside = [nn.Sequential(nn.Linear(4, 4), Means(is_running=True)) for _ in range(2)]
    wanted = train(copy.deepcopy(beside[0]))
    beside[1].load_state_dict(beside[0].state_dict())

    def program(rank: int) -> list[float]:
        farspan.distribute(models[rank])
        return train(beside[rank])

    assert run_threads(2, program) == [wanted] * 2


class Alternates(nn.Module):
    """The order of its dictionary says which of its layers is next."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.order = collections.OrderedDict(a=0, b=1, c=2)

    def forward(self, x: Tensor) -> Tensor:
        name = next(iter(self.order))
        self.order.move_to_end(name)
        return torch.tanh(self.layers[self.order[name]](x))


def test_what_remat_computes_again_finds_what_it_found() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*[Alternates() for _ in range(3)]), nn.Linear(4, 4))
    models = [copy.deepcopy(model) for _ in range(2)]
    assert run_threads(2, lambda rank: train(farspan.distribute(models[rank], remat=True))) == [train(model)] * 2


def test_a_batch_of_a_model_that_leaves_a_trace_stays_whole() -> None:
    plain = contextvars.copy_context().run(train, built(CountsInAContext))
    models = [built(CountsInAContext) for _ in range(2)]

    def program(rank: int) -> list[float]:
        return contextvars.copy_context().run(train, farspan.distribute(models[rank], micro_batches=2))

    assert run_threads(2, program) == [plain] * 2


class CountsWhereDataSay(CountsAround):
    """Counts from its third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
        return Tanh.forward(self, x) / (self.counted() if self.calls > 3 else 1)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_a_module_counts_around_it_only_when_its_data_say_so_is_an_error(num_ranks: int) -> None:
    models = [built(CountsWhereDataSay) for _ in range(num_ranks)]
    with pytest.raises(RecordError, match="did something else around its modules than before"):
        run_threads(num_ranks, lambda rank: [train(model) for model in [farspan.distribute(models[rank])] * 2])

"""What has been computed belongs to every rank: one alone may slice, compute with and print it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, mlp, on_ranks
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.execute.process.world import current_engine

RANKS = [2, 3]


def _train(model: nn.Module, look: Callable[[int, torch.Tensor], Any], state: bool = True) -> Any:
    """Three steps, in each of which `look` is given the output once it has been computed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.zeros(5)
    seen: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        out = model(X)
        loss = F.cross_entropy(out + average, Y)
        loss.backward()
        optimizer.step()
        seen.append((loss.item(), look(step, out)))
        if state:  # what has been computed is used again: recorded, on every rank
            average = 0.9 * average + 0.1 * out.detach().mean(0)
    return seen, average.tolist(), [parameter.tolist() for parameter in model.parameters()]


def _row(step: int, out: torch.Tensor) -> Any:
    return out[step, 1:3].tolist()


def _likeliest(step: int, out: torch.Tensor) -> Any:
    return [row.argmax().item() for row in out.softmax(-1)[:3]]


def _text(step: int, out: torch.Tensor) -> Any:
    return str(out.detach().argmax(-1)), f"{out.max():.9f}"


def _edited(step: int, out: torch.Tensor) -> Any:
    probabilities, best, total = out.detach().softmax(-1), out.detach()[step], torch.zeros(5)
    probabilities[0, 1] = 0.5
    total += probabilities.mean(0)
    total[:2].add_(best[1])
    best = best.clone().fill_(2.0)
    return probabilities[:2].tolist(), total.tolist(), best.mul_(3).sum().item(), out[0].tolist()


def _mask(step: int, out: torch.Tensor) -> Any:
    return out[out > 0].tolist(), out.argmax(-1).unique().tolist()


def _numpy(step: int, out: torch.Tensor) -> Any:
    return out.detach()[:, 0].numpy().tolist(), (out.argmax(-1) == Y).float().mean().item()


def _columns(step: int, out: torch.Tensor) -> Any:
    return [column.sum().item() for column in out.t().unbind(0)], out.t().contiguous().view(-1)[:4].tolist()


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("look", [_row, _likeliest, _text, _edited, _mask, _numpy, _columns])
def test_one_rank_alone_looks_at_what_has_been_computed(look: Callable[..., Any], num_ranks: int) -> None:
    wanted_seen, *wanted = _train(mlp(), look)
    models = [mlp() for _ in range(num_ranks)]

    def program(rank: int) -> Any:
        farspan.distribute(models[rank])
        return _train(models[rank], look if rank == 0 else lambda step, out: None)

    for rank, (seen, *got) in enumerate(run_threads(num_ranks, program)):
        assert got == wanted
        assert [loss for loss, _ in seen] == [loss for loss, _ in wanted_seen]
        if rank == 0:
            assert seen == wanted_seen


@pytest.mark.parametrize("last", [False, True])
def test_what_one_rank_has_taken_may_be_read_later(last: bool) -> None:
    def program(model: nn.Module, rank: int) -> Any:
        kept: list[torch.Tensor] = []

        def look(step: int, out: torch.Tensor) -> Any:
            if rank == (1 if last else 0):
                kept.append(out.detach()[step] * 2)

        result = _train(model, look)
        return result, [tensor.tolist() for tensor in kept]

    models = [mlp(), mlp()]

    def on_rank(rank: int) -> Any:
        farspan.distribute(models[rank])
        return program(models[rank], rank)

    wanted, kept = program(mlp(), 1 if last else 0)
    got = run_threads(2, on_rank)
    assert [result for result, _ in got] == [wanted, wanted]
    assert got[1 if last else 0][1] == kept


def _views(model: nn.Module) -> Any:
    """A write into a view, or into what has views, shows in all of them, and not in what was made of them before."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for _ in range(2):
        optimizer.zero_grad()
        out = model(X)
        F.cross_entropy(out, Y).backward()
        optimizer.step()
        plain = out.detach()
        row, doubled, column = plain[1], plain * 2, plain[:, 2]
        row.zero_()
        seen += [plain.tolist(), column.tolist(), doubled.tolist()]
        plain.add_(1)
        seen += [row.tolist(), column.tolist(), out.tolist(), doubled[1].tolist()]
        doubled.mul_(column[:, None])
        seen += [doubled.tolist(), (doubled + row).sum().item()]
    return seen


def _carried(model: nn.Module) -> Any:
    """State that is carried from step to step, read seldom, written in place and out of place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total, history = torch.zeros(()), []
    slow: Any = None
    for step in range(4):
        optimizer.zero_grad()
        out = model(X)
        loss = F.cross_entropy(out if slow is None else out + slow, Y)
        loss.backward()
        optimizer.step()
        total = total + (out.argmax(-1) == Y).sum()
        slow = out.detach() if slow is None else slow.lerp(out.detach(), 0.3)
        history.append(out.argmax(-1))
        if step == 2:
            slow *= 0.5
            history[0] += 1
    return total.item(), slow.tolist(), torch.cat(history).tolist(), torch.stack(history)[:, 0].float().mean().item()


def _gradients(model: nn.Module) -> Any:
    """What has been computed becomes a gradient, a gradient's factor, and a parameter's data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        out = model(X)
        F.cross_entropy(out, Y).backward()
        scale = out.detach().abs().max()
        flush = scale.item()
        last = list(model.parameters())[-1]
        last.grad = out.detach().mean(0) / (1 + scale)
        gradient: Any = next(model.parameters()).grad
        gradient.mul_(scale / 7)
        optimizer.step()
        last.data = out.detach().mean(0) * flush
    return [parameter.tolist() for parameter in model.parameters()]


def _second_loss(model: nn.Module) -> Any:
    """A part of what has been computed gets gradient after it has been read."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(2):
        optimizer.zero_grad()
        out = model(X)
        seen.append(out.sum().item())
        part = out[:3]
        seen.append(part.max().item())
        (F.cross_entropy(part, Y[:3]) + out[out > 0].mean()).backward()
        optimizer.step()
        seen.append([parameter.tolist() for parameter in model.parameters()])
    return seen


@pytest.mark.parametrize("num_ranks", [1, *RANKS])
@pytest.mark.parametrize("program", [_views, _carried, _gradients, _second_loss])
def test_what_has_been_computed_is_used_as_in_one_process(program: Callable[..., Any], num_ranks: int) -> None:
    wanted = program(mlp())
    for got in on_ranks(num_ranks, lambda model: program(farspan.distribute(model))):
        assert got == wanted


def test_one_rank_alone_looks_at_what_waits_to_be_recorded_again() -> None:
    """What was deferred and is then recorded is still there for each rank to compute."""

    def program(model: nn.Module, looks: bool) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state, seen = torch.zeros(5), []
        for _ in range(3):
            optimizer.zero_grad()
            out = model(X)
            loss = F.cross_entropy(out + state, Y)
            if looks:
                seen.append((state[1:].sum().item(), (state * 2).tolist()))
            loss.backward()
            optimizer.step()
            state = out.detach().softmax(-1).mean(0)
        return loss.item(), state.tolist(), seen

    *wanted, wanted_seen = program(mlp(), True)
    models = [mlp() for _ in range(3)]
    for rank, (*got, seen) in enumerate(
        run_threads(3, lambda rank: program(farspan.distribute(models[rank]), rank == 1))
    ):
        assert got == wanted and seen == (wanted_seen if rank == 1 else [])


def test_of_a_large_tensor_a_rank_fetches_what_it_reads() -> None:
    @torch.no_grad()
    def program(model: nn.Module) -> Any:
        out = model(torch.ones(4, 3))
        out.mean().item()
        values = getattr(current_engine(), "values", None)
        fetched: list[int] = []
        if values is not None:
            ask = values._ask
            values._ask = lambda *given: (
                answer := ask(*given),
                fetched.append(sum(item.nbytes for item in answer[1])),
            )[0]
        row = out.detach()[2].view(20, -1)[3, :4]
        return row.tolist(), out[:, 5].argmax().item(), out.t()[7, 1].item(), fetched

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 100_000))
    models = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 100_000)) for _ in range(2)]
    for model in models:
        model.load_state_dict(whole.state_dict())
    *wanted, _ = program(whole)
    results = run_threads(2, lambda rank: program(farspan.distribute(models[rank], plan={"0": 0, "1": 1})))
    assert [result[:3] for result in map(list, results)] == [wanted, wanted]
    assert results[1][3] == []
    assert results[0][3] == [16, 16, 4]


def test_what_is_made_of_a_used_graph_is_refused_after_a_write() -> None:
    def program(model: nn.Module) -> None:
        out = model(X)
        out.sum().backward()
        out.sum().item()
        doubled = out * 2
        with torch.no_grad():
            out.mul_(3)
        assert doubled.sum().item() == pytest.approx(out.sum().item() * 2 / 3)
        model(X).sum().item()
        (doubled + model(X)).sum().backward()
        farspan.flush()

    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        on_ranks(2, lambda model: program(farspan.distribute(model)))


class Branches(nn.Module):
    """What several later modules take, after a value has been read: its gradients are added up in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(12, 8), nn.Linear(8, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.softplus(self.first(x))
        scale = hidden.max().item()
        early, middle, late = (hidden / scale).sin(), self.part(hidden), hidden.exp()
        return self.last(middle + (late[:, :5] + early[:, 3:]))


@pytest.mark.parametrize("num_ranks", [1, *RANKS])
def test_gradients_of_what_was_computed_early_are_added_up_in_the_programs_order(num_ranks: int) -> None:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return Branches()

    wanted = _train(build(), _row)
    for got in on_ranks(num_ranks, lambda model: _train(farspan.distribute(model), _row), build):
        assert got == wanted


def test_what_was_deferred_and_dropped_keeps_nothing() -> None:
    def program(model: nn.Module) -> Any:
        model(X).sum().item()
        out = model(X)
        out.sum().item()
        kept = weakref.ref(out)
        gc.disable()
        try:
            row = out.detach()[0].softmax(-1).max()
            del out
            assert kept() is not None
            del row
            return kept() is None
        finally:
            gc.enable()

    assert on_ranks(2, lambda model: program(farspan.distribute(model))) == [True, True]

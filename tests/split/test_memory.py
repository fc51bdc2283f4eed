"""What a rank of a split stage holds while a step runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.ranks import run_threads
from tests.wide.loops import Net, loss_of

import farspan
from farspan.execute.process.world import current_engine
from farspan.graph import BackwardSegment, Segment, SliceName, whole_name
from farspan.record.parameters.away import AwayParameter


def test_slices_and_replaced_gradients_are_gone_before_the_last_gradients_are_there() -> None:
    """The slices that a rank is sent were held until the optimizer had stepped, and gradients that `zero_grad` had
    dropped until the next step was over: at the most, half as much again as one process's share."""

    def on_rank(rank: int) -> list[tuple[int, int]]:
        model = farspan.distribute(Net(), tensor_parallel=2)
        optimizer = torch.optim.Adafactor(model.parameters())  # for which parameters stay whole
        engine = current_engine()
        assert engine is not None
        seen: list[tuple[int, int]] = []

        def look(number: int) -> None:
            running: Any = engine.executor._running
            works = [action.work for action in running.actions if isinstance(action.work, Segment)]
            slices = {value for work in works for value in work.leaves if type(value.name) is SliceName}
            slices |= {v for w in works for v in w.inputs if type(v.name) is SliceName and v.data is not None}
            received = [value for value in slices if not engine.parameters[whole_name(value.name)].is_owned]
            seen.append((len(received), len(engine.values.gradients._replaced)))

        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            seen.clear()
            engine.executor.after_action = look
            optimizer.step()
        assert not engine.executor.replicas.tensors
        return seen

    for seen in run_threads(2, on_rank):
        slices, replaced = zip(*seen, strict=True)
        assert max(slices) > 1
        assert slices[-1] == 0
        assert max(replaced) == 0
        assert slices[len(slices) * 3 // 4] < max(slices), "they go one after another"


def test_slices_that_members_own_are_not_sent() -> None:
    """And a rank holds half of what one process does, also while parameters go into slices and come home."""

    def on_rank(rank: int) -> list[tuple[int, int]]:
        model = farspan.distribute(Net(), tensor_parallel=2)
        optimizer = torch.optim.AdamW(model.parameters())
        engine = current_engine()
        assert engine is not None
        found: list[tuple[int, int]] = []
        sent: list[int] = []
        replicas: Any = engine.executor.replicas
        end_step = replicas.end_step

        def note(graphs: Any, entries: Any) -> None:
            sent.append(sum(type(name) is SliceName for name, _ in entries))
            end_step(graphs, entries)

        replicas.end_step = note
        for number in range(5):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
            own = [item.tensor for item in engine.parameters.values() if item.is_owned and item.is_parameter]
            found.append((sent[-1], sum(item.numel() for item in own if type(item) is not AwayParameter)))
        return found

    one, other = run_threads(2, on_rank)
    num_elements = sum(item.numel() for item in Net().parameters())
    assert one[0][0] > 0 and other[0][0] > 0
    for found in (one, other):
        assert all(sent == 0 for sent, _ in found[3:])
    assert [mine + theirs for (_, mine), (_, theirs) in zip(one, other, strict=True)] == [num_elements] * 5


@pytest.mark.parametrize("axis", [{"tensor_parallel": 2}, {"plan": "auto"}], ids=["slices", "stages"])
def test_replaced_gradients_are_gone_before_new_ones_are_made(axis: dict[str, Any]) -> None:
    """A rank that has nothing to wait for kept them until its step was over: one more gradient for each parameter."""

    def on_rank(rank: int) -> list[tuple[bool, int]]:
        model = farspan.distribute(Net(), **axis)
        optimizer = torch.optim.AdamW(model.parameters())
        engine = current_engine()
        assert engine is not None
        seen: list[tuple[bool, int]] = []

        def look(number: int) -> None:
            running: Any = engine.executor._running
            is_backward = isinstance(running.actions[number].work, BackwardSegment)
            seen.append((is_backward, len(engine.values.gradients._replaced)))

        for number in range(4):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            seen.clear()
            engine.executor.after_action = look
            optimizer.step()
        return seen

    for seen in run_threads(2, on_rank):
        after_backwards = [num_replaced for is_backward, num_replaced in seen if is_backward]
        assert after_backwards and not any(after_backwards)


def test_slices_stay_where_parameters_do() -> None:
    """What is evaluated twice is sent once."""

    def on_rank(rank: int) -> list[int]:
        model = farspan.distribute(Net(), tensor_parallel=2).eval()
        engine = current_engine()
        assert engine is not None
        known: list[int] = []
        with torch.no_grad():
            for number in range(3):
                loss_of(model, number).item()
                known.append(len(engine.executor.replicas.known))
        return known

    for known in run_threads(2, on_rank):
        assert known[-1] == known[-2] > 0


def test_a_slice_of_columns_takes_no_memory_for_what_is_between_them() -> None:
    """It was laid out where it arrived as where it is a part of the whole matrix: over the memory of all of that."""

    def on_rank(rank: int) -> list[bool]:
        model = farspan.distribute(Net(), tensor_parallel=2)
        optimizer = torch.optim.AdamW(model.parameters())
        engine = current_engine()
        assert engine is not None
        are_dense: list[bool] = []

        def look(number: int) -> None:
            running: Any = engine.executor._running
            works = [action.work for action in running.actions if isinstance(action.work, Segment)]
            for value, leaf in [item for work in works for item in work.leaves.items()]:
                if type(value.name) is SliceName and not engine.parameters[whole_name(value.name)].is_owned:
                    are_dense.append(leaf.is_contiguous())

        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            engine.executor.after_action = look
            optimizer.step()
        return are_dense

    found = run_threads(2, on_rank)
    assert any(found)
    assert all(map(all, found))


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "zero-bubble"])
def test_a_team_holds_two_micro_batches(schedule: str) -> None:
    """Each wait for the other member counted as one more stage: the more layers, the more were in flight."""

    def on_rank(rank: int) -> float:
        model = farspan.distribute(Net(), tensor_parallel=2, schedule=schedule)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = current_engine()
        assert engine is not None
        held: list[float] = []

        def look(number: int) -> None:
            running: Any = engine.executor._running
            works = [action.work for action in running.actions]
            with_backward = {work.segment for work in works if isinstance(work, BackwardSegment)}
            done = works[: number + 1]
            ended = {work.segment for work in done if isinstance(work, BackwardSegment)}
            held.append(sum(work in with_backward and work not in ended for work in done) * 12 / len(with_backward))

        for _ in range(2):
            optimizer.zero_grad()
            for number in range(12):
                loss_of(model, number).backward()
            engine.executor.after_action = look
            optimizer.step()
        return max(held)

    assert max(run_threads(2, on_rank)) <= 2

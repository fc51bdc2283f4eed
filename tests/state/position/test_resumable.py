"""A loader goes on with the batch after the last one that was taken: the same order, the same random numbers."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from farspan.state.generators import generators_from_json, generators_to_json
from farspan.state.position import resumable as module
from farspan.state.position.resumable import Resumable, loaders_from_json, resumable


class Noisy(Dataset[torch.Tensor]):
    """Each item draws from all generators."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), float(np.random.rand()), torch.rand(()).item()])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(9):
            yield torch.tensor([index, torch.rand(()).item()])


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def play(loader: Resumable[Any], num_batches: int, draws: bool = True) -> tuple[list[Any], list[str]]:
    """So many batches over as many epochs as that takes, and the state after each."""
    batches: list[Any] = []
    states: list[str] = []
    while True:
        for batch in loader:
            batches.append(batch.tolist() + ([torch.rand(()).item()] if draws else []))
            states.append(json.dumps([loader.to_json(1), generators_to_json(torch.default_generator)]))
            if len(batches) == num_batches:
                return batches, states


KINDS: dict[str, dict[str, Any]] = {
    "in order": {"batch_size": 4},
    "shuffled": {"batch_size": 4, "shuffle": True},
    "with a generator": {"batch_size": 4, "shuffle": True, "generator": True},
    "single items": {"batch_size": None, "shuffle": True},
    "workers": {"batch_size": 4, "shuffle": True, "num_workers": 2},
    "workers that stay": {"batch_size": 3, "shuffle": True, "num_workers": 2, "persistent_workers": True},
    "workers that stay, with a generator": {
        "batch_size": 3,
        "shuffle": True,
        "num_workers": 2,
        "persistent_workers": True,
        "generator": True,
    },
    "workers with single items": {"batch_size": None, "shuffle": True, "num_workers": 2},
    "a stream": {"batch_size": 2, "dataset": Stream()},
    "a stream in a worker": {"batch_size": 2, "dataset": Stream(), "num_workers": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_at_the_next_batch_wherever_it_stopped(kind: str) -> None:
    options = dict(KINDS[kind])
    has_generator, dataset = options.pop("generator", False), options.pop("dataset", Noisy())

    def make() -> Resumable[Any]:
        own: dict[str, Any] = {"generator": torch.Generator().manual_seed(7)} if has_generator else {}
        return resumable(DataLoader(dataset, **options, **own))

    num_batches = 11 if options.get("batch_size") else 17
    seed()
    batches, states = play(make(), num_batches)
    stops = [0, 3, 4, num_batches - 3] if options.get("num_workers") else range(num_batches - 1)
    for stop in stops:
        torch.manual_seed(99)
        random.seed(99)
        place, generators = json.loads(states[stop])
        again = make()
        again.from_json(place, 1, "a test")
        generators_from_json(torch.default_generator, generators, "a test")
        rest, _ = play(again, num_batches - 1 - stop)
        assert rest == batches[stop + 1 :], f"after batch {stop}"


def test_the_given_loader_is_as_it_was_and_its_length_too() -> None:
    given = DataLoader(Noisy(), batch_size=4, num_workers=1)
    before = dict(vars(given))
    loader = resumable(given)
    assert len(loader) == 4 and loader.batch_size == 4 and loader.dataset is given.dataset
    assert [batch.shape[0] for batch in loader] == [4, 4, 4, 1]
    assert loader.epoch == 1 and vars(given) == before


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_loader_that_nobody_holds_any_more_ends_its_workers(is_resumed: bool) -> None:
    """It held itself while an epoch went on. Python collects such rings in an order in which torch's workers are not
    asked to end: it waited 5 s for each."""
    loader = resumable(DataLoader(Noisy(), batch_size=3, num_workers=1, persistent_workers=True))
    if is_resumed:
        next(iter(loader))
        loader.from_json(loader.to_json(1), 1, "a test")
    gc.disable()
    try:
        next(iter(loader))
        (worker,) = loader._loader._iterator._workers  # type: ignore[union-attr]
        del loader
        worker.join(60)
        assert worker.exitcode == 0  # not that of one that was killed
    finally:
        gc.enable()


def test_an_epoch_that_is_left_early_is_an_epoch() -> None:
    loader = resumable(DataLoader(Noisy(), batch_size=4))
    for _ in loader:
        break
    assert (loader.epoch, loader.position) == (0, 1)
    assert len(list(loader)) == 4 and loader.epoch == 2


def test_loaders_that_are_made_after_loading_go_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_thread", type("Thread", (), {})())
    seed()
    batches, states = play(resumable(DataLoader(Noisy(), batch_size=4, shuffle=True)), 7)
    monkeypatch.setattr(module, "_thread", type("Thread", (), {})())
    place, generators = json.loads(states[1])
    loaders_from_json([place], 1, "a test")
    generators_from_json(torch.default_generator, generators, "a test")
    rest, _ = play(resumable(DataLoader(Noisy(), batch_size=4, shuffle=True)), 5)
    assert rest == batches[2:]


def test_groups_of_ranks_share_what_has_been_taken() -> None:
    loader = resumable(DataLoader(Noisy(), batch_size=1))
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    again = resumable(DataLoader(Noisy(), batch_size=1))
    again.from_json(json.loads(json.dumps(loader.to_json(1))), 2, "a test")
    assert again.position == 2


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_between_two_epochs_and_in_a_loader_that_has_run(kind: str) -> None:
    """Workers that stay have drawn in the epochs before: new ones, and the order, began with their first draws."""
    options = dict(KINDS[kind])
    has_generator, dataset = options.pop("generator", False), options.pop("dataset", Noisy())

    def make() -> Resumable[Any]:
        own: dict[str, Any] = {"generator": torch.Generator().manual_seed(7)} if has_generator else {}
        return resumable(DataLoader(dataset, **options, **own))

    def epoch(loader: Resumable[Any]) -> list[Any]:
        return [[*batch.tolist(), torch.rand(()).item()] for batch in loader]

    seed()
    loader = make()
    epoch(loader)
    saved = json.dumps([loader.to_json(1), generators_to_json(torch.default_generator)])
    rest = [epoch(loader), epoch(loader)]
    for again in (make(), loader):
        torch.manual_seed(99)
        place, generators = json.loads(saved)
        again.from_json(place, 1, "a test")
        generators_from_json(torch.default_generator, generators, "a test")
        assert [epoch(again), epoch(again)] == rest

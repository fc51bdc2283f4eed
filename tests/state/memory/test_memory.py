"""Checkpoints in memory: the newest of those in memory and those on the disk is loaded, under any plan, to the bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.state.test_save_and_load import Program, damaged_in, until
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.errors import CheckpointError
from farspan.state.memory import room


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("FARSPAN_MEMORY", str(folder))
    return folder


@pytest.mark.parametrize(("first", "second"), [(1, 2), (3, 2)])
def test_a_program_goes_on_from_memory_as_if_it_had_never_ended(
    tmp_path: Path, memory: Path, first: int, second: int
) -> None:
    def save(rank: int) -> list[float]:
        program = Program()
        program.step(2)
        saved = program.save(tmp_path / "a", memory=True)
        program.step()  # while it is written
        saved.wait()
        return program.losses[:2]

    losses = run_threads(first, save)[0]

    def load(rank: int) -> list[object]:
        program = Program()
        program.losses = list(losses)
        program.load(tmp_path / "a")
        program.step(2)
        return program.state()

    assert run_threads(second, load) == [until(4)] * second
    assert not (tmp_path / "a").exists()


def test_the_newest_is_taken_whether_it_is_in_memory_or_on_the_disk(tmp_path: Path, memory: Path) -> None:
    model, folder = nn.Linear(2, 2), tmp_path / "a"
    for step, is_in_memory in ((4, False), (5, True), (6, True), (6, False), (2, True)):  # the last one goes back
        path = farspan.save(folder, model=model, step=step, memory=is_in_memory, wait=True).wait()
        assert farspan.latest(folder) == path and path.startswith(str(memory)) == is_in_memory
        assert farspan.load(folder, model=model).path == path
    assert sorted(os.listdir(folder)) == ["latest", "step-4", "step-6"]
    assert sorted(os.listdir(os.path.dirname(path))) == ["latest", "step-2"]
    assert farspan.save(folder, model=model, memory=True, wait=True).wait().endswith("/step-3")


def test_a_save_that_did_not_end_leaves_the_one_before_and_is_removed_by_the_next(tmp_path: Path, memory: Path) -> None:
    model = nn.Linear(2, 2)
    kept = farspan.save(tmp_path / "a", model=model, step=1, memory=True, wait=True).wait()
    draft = Path(f"{os.path.dirname(kept)}/step-2.tmp-0a")
    draft.mkdir()
    assert farspan.load(tmp_path / "a", model=model).step == 1
    farspan.save(tmp_path / "a", model=model, step=2, memory=True, wait=True)
    assert farspan.load(tmp_path / "a", model=model).step == 2 and not draft.exists()


def test_what_is_damaged_in_memory_is_on_the_disk(tmp_path: Path, memory: Path) -> None:
    model = nn.Linear(2, 2)
    on_disk = farspan.save(tmp_path / "a", model=model, step=1, wait=True).wait()
    kept = farspan.save(tmp_path / "a", model=model, step=2, memory=True, wait=True).wait()
    damaged_in(kept, "model/weight")
    with pytest.raises(CheckpointError, match=f'farspan.load\\("{on_disk}"'):
        farspan.load(tmp_path / "a", model=model)
    assert farspan.load(tmp_path / "a", model=model, strict=False).path == on_disk


def test_what_does_not_fit_is_said_on_every_rank_before_anything_is_written(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(rank: int) -> list[str]:
        program = Program()
        program.save(tmp_path / "a", memory=True, wait=True)
        program.step()
        if rank == 0:
            monkeypatch.setattr(room, "free_bytes", lambda folder: 1000)
        with pytest.raises(CheckpointError) as caught:
            program.save(tmp_path / "a", memory=True)
        return str(caught.value).splitlines()[:2]

    first, second = run_threads(2, save)
    assert first == second and first[0].endswith("what is saved does not fit into the memory that is free.")
    assert "1000 B are free" in first[1]
    (kept,) = memory.iterdir()
    assert sorted(os.listdir(kept)) == ["latest", "step-0"]


def test_ranks_that_save_to_other_places_are_found(tmp_path: Path, memory: Path) -> None:
    def save(rank: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            Program().save(tmp_path / "a", memory=rank == 0)
        return str(caught.value)

    assert all("ranks 0 and 1 save different values for memory" in text for text in run_threads(2, save))


def test_without_memory_that_outlives_the_program_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FARSPAN_MEMORY", raising=False)
    model = nn.Linear(2, 2)
    for step in range(2):
        assert farspan.save(tmp_path / "a", model=model, step=step, memory=True).wait() == ""
    assert farspan.latest(tmp_path / "a") is None and not (tmp_path / "a").exists()
    assert torch.isfinite(model.weight).all()

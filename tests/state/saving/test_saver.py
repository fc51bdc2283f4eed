"""A save has failed on all ranks or on none, whatever goes wrong, and its failure reaches the program."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan import documents
from farspan.errors import CheckpointError
from farspan.execute.process.world import current_engine
from farspan.state.format import disk, newest
from farspan.state.saving import saver as saver_module
from farspan.state.saving.saver import saver_of
from farspan.state.saving.snapshot import Arena


class Two(nn.Module):
    """Two layers for two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def distributed() -> nn.Module:
    return farspan.distribute(Two(), plan={"first": "rank:0", "second": "rank:1"})


def failing(error: Exception) -> Callable[..., None]:
    def fail(*args: Any, **more: Any) -> None:
        raise error

    return fail


def test_a_failure_is_heard_each_time_a_save_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time it returned the folder of a checkpoint that was not there."""
    model = nn.Linear(2, 2)
    with monkeypatch.context() as patched:
        patched.setattr(disk, "fsync", failing(OSError(errno.EIO, os.strerror(errno.EIO))))
        saved = farspan.save(tmp_path, model=model, step=1)
        with pytest.raises(CheckpointError):
            farspan.save(tmp_path, model=model, step=2)
    farspan.save(tmp_path, model=model, step=3, wait=True)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="could not be written"):
            saved.wait()


def test_a_save_ends_whatever_goes_wrong_in_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread died, the program waited for twice its deadline and heard nothing of why, and the others likewise."""
    monkeypatch.setattr(saver_module, "commit_votes", failing(ValueError("a mistake of farspan's")))

    def save(rank: int) -> str:
        saved = farspan.save(tmp_path, model=distributed(), step=1)
        with pytest.raises(CheckpointError) as caught:
            saved.wait()
        return str(caught.value)

    for text in run_threads(2, save):
        assert "ValueError: a mistake of farspan's" in text
    assert [*tmp_path.iterdir()] == []


class NoMemory(Arena):
    """A rank's, that is at its limit."""

    copy = failing(MemoryError("no memory"))  # type: ignore[assignment]


def test_a_rank_that_cannot_begin_fails_the_save_on_every_rank(tmp_path: Path) -> None:
    """It raised on that rank alone; a program that caught that numbered its saves otherwise than the others."""

    def save(rank: int) -> tuple[str, str]:
        model = distributed()
        engine = current_engine()
        assert engine is not None
        if rank == 1:
            saver_of(engine).arena = NoMemory()
        with pytest.raises(CheckpointError) as caught:
            farspan.save(tmp_path, model=model, step=1, snapshot="copy").wait()
        saver_of(engine).arena = Arena()
        return str(caught.value), os.path.basename(farspan.save(tmp_path, model=model, step=2).wait())

    for text, name in run_threads(2, save):
        assert "rank 1: " in text and "MemoryError: no memory" in text
        assert name == "step-2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-2"]


def test_what_one_rank_alone_cannot_save_is_raised_on_every_rank(tmp_path: Path) -> None:
    """Only the owner sees what an optimizer keeps for a parameter: the others waited for it. Nothing may be left."""

    def save(rank: int) -> list[str]:
        model = distributed()
        found: list[str] = []
        for extra in ({"f": print if rank else 1}, {"number": rank}):
            with pytest.raises(CheckpointError) as caught:
                farspan.save(tmp_path, model=model, step=1, extra=extra)
            found.append(str(caught.value).splitlines()[0])
        return found

    for refused, differs in run_threads(2, save):
        assert "rank 1: extra/f cannot be saved" in refused
        assert "ranks 0 and 1 save different values for extra/number" in differs
    assert [*tmp_path.iterdir()] == []


def test_a_rank_whose_file_is_written_waits_for_a_larger_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank gave up after its deadline by itself: one alone heard of a failure that was none."""
    written = disk.write

    def slow(file: int, data: bytes | memoryview) -> None:
        if threading.current_thread().name == "farspan-save-1":
            threading.Event().wait(0.1)
        written(file, data)

    monkeypatch.setattr(disk, "write", slow)
    monkeypatch.setattr("farspan.state.saving.save._LEAST_BYTES_PER_S", 1)

    def save(rank: int) -> str:
        model = distributed()
        extra = {f"{number:02}": torch.ones(2) for number in range(20)}
        engine = current_engine()
        assert engine is not None
        engine.deadline_s = saver_of(engine).deadline_s = 0.5
        return os.path.basename(farspan.save(tmp_path, model=model, step=1, extra=extra).wait())

    assert run_threads(2, save) == ["step-1"] * 2


def test_what_could_not_be_read_again_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are bounds on what is read: a checkpoint beyond them was saved, and older ones went, but never loaded."""
    monkeypatch.setattr(documents, "MAX_VALUES", 1000)
    farspan.save(tmp_path, extra={"losses": [0.5] * 100}, step=1, keep=1, wait=True)
    with pytest.raises(CheckpointError, match=r"(?s)could not be read again.*too many values"):
        farspan.save(tmp_path, extra={"losses": [0.5] * 2000}, step=2, keep=1, wait=True)
    assert os.path.basename(newest(str(tmp_path)) or "") == "step-1"
    assert farspan.load(tmp_path).extra == {"losses": [0.5] * 100}


def test_a_fork_has_shared_memory_as_it_was_too(tmp_path: Path) -> None:
    """The kernel copies no page that processes share: the child wrote what the program had there later."""
    model = nn.Linear(1500, 1500).share_memory()
    before = model.weight.detach().clone()
    saved = farspan.save(tmp_path, model=model, step=1, snapshot="fork")
    with torch.no_grad():
        model.weight.zero_()
    saved.wait()
    farspan.load(tmp_path, model=model)
    assert torch.equal(model.weight, before)


def test_a_program_with_thousands_of_open_files_can_fork(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    files: list[int] = []
    try:
        while not files or files[-1] < 1100:
            files.append(os.dup(0))
        farspan.save(tmp_path, model=nn.Linear(2, 2), step=1, snapshot="fork").wait()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

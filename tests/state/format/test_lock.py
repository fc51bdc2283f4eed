"""Two programs do not save into one folder at a time: each would remove what the other is writing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.errors import CheckpointError
from farspan.state.format import disk, hold
from farspan.state.saving import saver as saver_module


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_second_program_is_told_on_every_rank(tmp_path: Path) -> None:
    other = hold(str(tmp_path))
    assert other is not None

    def save(rank: int) -> str:
        model = farspan.distribute(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        with pytest.raises(CheckpointError) as caught:
            farspan.save(tmp_path, model=model, step=1)
        return str(caught.value)

    for text in run_threads(2, save):
        assert f"another program is saving into {tmp_path}" in text
        assert f"process {os.getpid()} on " in text and "try" in text
    other.release()
    farspan.save(tmp_path, extra={"a": 1}, step=1, wait=True)
    assert names_in(tmp_path) == ["latest", "step-1"]


def test_a_save_that_goes_on_is_not_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one removed the first one's draft, as what a crash had left."""
    commit_votes = saver_module.commit_votes

    def commit(*args: object) -> str:
        with pytest.raises(CheckpointError, match="another program"):
            hold(str(tmp_path))
        return commit_votes(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(saver_module, "commit_votes", commit)
    for step in (1, 2):
        farspan.save(tmp_path, model=nn.Linear(2, 2), step=step).wait()
    assert names_in(tmp_path) == ["latest", "step-1", "step-2"]


def test_who_is_dead_locks_nothing(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        hold(str(tmp_path))
        os.write(writing, b"held")
        signal.pause()
    assert os.read(reading, 4) == b"held"
    with pytest.raises(CheckpointError, match=f"process {child} on"):
        farspan.save(tmp_path, extra={"a": 1}, wait=True)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    farspan.save(tmp_path, extra={"a": 1}, step=3, wait=True)
    assert names_in(tmp_path) == ["latest", "step-3"]


def test_a_save_that_fails_or_is_refused_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="cannot be saved"):
        farspan.save(tmp_path, extra={"f": print})
    with monkeypatch.context() as patched:
        patched.setattr(disk, "fsync", failing)
        with pytest.raises(CheckpointError):
            farspan.save(tmp_path, extra={"a": torch.ones(2)}, wait=True)
    lock = hold(str(tmp_path))
    assert lock is not None
    lock.release()


def failing(*args: object) -> None:
    raise OSError(5, "broken")


def test_a_file_system_without_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "lock", lambda file: None)
    farspan.save(tmp_path, extra={"a": 1}, step=1, wait=True)
    assert farspan.load(tmp_path).extra == {"a": 1}

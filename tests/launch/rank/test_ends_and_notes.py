"""Who tells of the end of a process, what waits for an import, and notes that come from another host."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from farspan.launch.rank import absent, process_end
from farspan.launch.rank.imports import when_imported
from farspan.launch.rank.notes import add_notes, all_notes, has_joined, waiting_ranks


@pytest.mark.skipif(not hasattr(os, "getpgrp"), reason="there are no process groups here")
@pytest.mark.parametrize("is_started_by_launcher", [True, False])
def test_of_the_processes_of_a_rank_only_its_own_tells_of_its_end(
    monkeypatch: pytest.MonkeyPatch, is_started_by_launcher: bool
) -> None:
    actions: list[Any] = []
    monkeypatch.setattr(absent, "at_process_end", actions.append)
    monkeypatch.setattr(os, "getpgrp", lambda: os.getpid() if is_started_by_launcher else os.getppid())
    absent.watch_end("messenger")
    assert len(actions) == is_started_by_launcher


def test_what_waits_for_an_import_comes_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_by_a_test.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    for number in range(3):
        when_imported("imported_by_a_test", lambda module, number=number: seen.append(number))
    importlib.import_module("imported_by_a_test")
    del sys.modules["imported_by_a_test"]
    assert seen == [0, 1, 2]


def test_open_files_are_looked_for_by_class_however_many_objects_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has a million objects. To ask of each whether it is a file took seconds, in which the others waited."""
    asked: list[type] = []

    class Asks(type):
        def __subclasscheck__(cls, other: type) -> bool:
            asked.append(other)
            return type.__subclasscheck__(cls, other)

    class Compressed(metaclass=Asks):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    file, others = Compressed(), [set[int]() for _ in range(1000)]
    monkeypatch.setattr(process_end, "_compressed_files", lambda: (Compressed,))
    process_end.write_open_files()
    assert file.is_closed and len(others) == 1000
    assert asked.count(set) == 1 and len(asked) == len(set(asked))


def test_notes_of_another_host_are_here_too_and_nothing_else(tmp_path: Path) -> None:
    folder = str(tmp_path)
    add_notes(folder, ["waiting-3", "../waiting-4", "ended-1", "waiting-5"])
    assert waiting_ranks(folder) == {3, 5} and not has_joined(folder)
    add_notes(folder, ["joined"])
    assert has_joined(folder)
    assert all_notes(folder) == sorted(os.listdir(folder)) == ["joined", "waiting-3", "waiting-5"]

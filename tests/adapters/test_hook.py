"""A module of another package is adapted when it is loaded, or at once if it is."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from farspan.adapters.hook import when_imported
from farspan.launch.rank.imports import while_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "pkg_of_test_hook"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text("VALUE = 1\n\ndef answer():\n    return VALUE\n")
    (folder / "user.py").write_text("from pkg_of_test_hook.part import VALUE\n")
    (folder / "broken.py").write_text("raise ValueError('not today')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder.name
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


def test_a_module_is_adapted_once_it_is_imported_by_whomever(package: str) -> None:
    seen: list[str] = []

    def act(module: ModuleType) -> None:
        seen.append(module.__name__)
        module.VALUE = 2  # type: ignore[attr-defined]

    when_imported(f"{package}.part", act)
    assert seen == []
    user = importlib.import_module(f"{package}.user")
    part = importlib.import_module(f"{package}.part")
    assert seen == [f"{package}.part"]
    assert user.VALUE == 2 and part.answer() == 2
    assert "return VALUE" in inspect.getsource(part.answer) and str(part.__file__).endswith("part.py")


def test_a_module_that_is_there_is_adapted_at_once(package: str) -> None:
    part = importlib.import_module(f"{package}.part")
    seen: list[ModuleType] = []
    when_imported(f"{package}.part", seen.append)
    assert seen == [part]


def test_a_module_that_is_not_there_or_does_not_load_says_so_as_ever(package: str) -> None:
    seen: list[ModuleType] = []
    when_imported(f"{package}.nowhere", seen.append)
    when_imported(f"{package}.broken", seen.append)
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        importlib.import_module(f"{package}.nowhere")
    for _ in range(2):
        with pytest.raises(ValueError, match="not today"):
            importlib.import_module(f"{package}.broken")
    assert seen == []


def test_a_module_is_loaded_within_what_is_asked_for(package: str) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        seen.append("before")
        try:
            yield
        finally:
            seen.append("after")

    for _ in range(2):
        while_imported(f"{package}.part", around)
    while_imported(f"{package}.broken", around)
    when_imported(f"{package}.part", lambda module: seen.append("loaded"))
    importlib.import_module(f"{package}.part")
    assert seen == ["before", "loaded", "after"]
    with pytest.raises(ValueError, match="not today"):
        importlib.import_module(f"{package}.broken")
    assert seen[3:] == ["before", "after"]
    while_imported(f"{package}.part", around)
    importlib.import_module(f"{package}.part")
    assert len(seen) == 5

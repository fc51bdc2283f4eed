"""The two tiers of tests: `make test` runs the quick one, `make test-all` every test.

What is listed in tests/left_to_test_all.txt is left out of the quick tier, and a file that is listed as a whole is not
even imported. Without `--tier=quick`, so also in a plain `pytest tests/schedule`, every test runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

__all__ = ["LIST", "Tiers"]

LIST = "tests/left_to_test_all.txt"


class Tiers:
    """A plugin of pytest that runs the tier which the option `--tier` names."""

    def __init__(self, config: pytest.Config) -> None:
        self._is_quick = config.getoption("tier") == "quick"
        self._root = config.rootpath
        self._lines = _lines_of(config.rootpath / LIST)
        self._left_out = frozenset(self._lines)
        self._has_whole_files = not any("::" in word for word in config.args)
        self.matching_nothing: list[str] = []
        """The lines whose file was collected as a whole, or does not exist, and that name no test."""

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """A file that is left out as a whole is not imported."""
        if not self._is_quick or collection_path.suffix != ".py":
            return None
        return True if collection_path.relative_to(self._root).as_posix() in self._left_out else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselects what is left out; finds the lines that match nothing before other options deselect tests."""
        if self._has_whole_files:
            self.matching_nothing = list(self._find_matching_nothing(items))
        if self._is_quick and (left := [item for item in items if not self._left_out.isdisjoint(_names_of(item))]):
            config.hook.pytest_deselected(items=left)
            kept = [item for item in items if self._left_out.isdisjoint(_names_of(item))]
            items[:] = kept

    def _find_matching_nothing(self, items: Sequence[pytest.Item]) -> Iterator[str]:
        found = {name for item in items for name in _names_of(item)}
        for line in self._lines:
            file, _, test = line.partition("::")
            is_wrong = test and file in found and line not in found
            if is_wrong or not (self._root / file).exists():
                yield line


def _lines_of(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _names_of(item: pytest.Item) -> tuple[str, str, str]:
    """The names by which a line may mean a test: its file, the function, and the one set of parameters."""
    return item.nodeid.partition("::")[0], item.nodeid.partition("[")[0], item.nodeid

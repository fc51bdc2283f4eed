"""The list of what `make test` leaves to `make test-all`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.tiers.tiers import LIST, Tiers

pytest_plugins = ["pytester"]
_CONFTEST = """
from tests.tiers.tiers import Tiers

def pytest_addoption(parser):
    parser.addoption("--tier", choices=("quick", "all"), default="all")

def pytest_configure(config):
    config.pluginmanager.register(Tiers(config), "tiers")
"""
_TESTS = """
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_numbers(number):
    pass

def test_long():
    pass

def test_short():
    pass
"""


def test_each_line_names_a_test(pytestconfig: pytest.Config) -> None:
    """A line that names no test of a file that was collected, or a file that is gone, is to be removed."""
    tiers: Any = pytestconfig.pluginmanager.get_plugin("tiers")
    assert tiers.matching_nothing == [], f"these lines of {LIST} match no test"


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project of two files of tests, one of which cannot be imported, and a list."""
    pytester.makeini("[pytest]")
    pytester.makeconftest(_CONFTEST)
    folder = pytester.mkdir("tests")
    (folder / "test_some.py").write_text(_TESTS)
    (folder / "test_broken.py").write_text("raise AssertionError('imported')")
    lines = ["# what is left", "tests/test_broken.py", "tests/test_some.py::test_long"]
    (folder / "left_to_test_all.txt").write_text("\n".join([*lines, "tests/test_some.py::test_numbers[2]", ""]))
    return pytester


def _names(project: pytest.Pytester, *words: str) -> list[str]:
    found = project.runpytest_inprocess("--collect-only", "-q", *words)
    return [line.rpartition("::")[2] for line in found.outlines if "::" in line]


def test_the_quick_tier_leaves_out_files_tests_and_parameters(project: pytest.Pytester) -> None:
    assert _names(project, "--tier=quick") == ["test_numbers[1]", "test_short"]


def test_all_is_what_is_run_by_hand(project: pytest.Pytester) -> None:
    expected = ["test_numbers[1]", "test_numbers[2]", "test_long", "test_short"]
    assert _names(project, "tests/test_some.py") == expected == _names(project, "--tier=all", "tests/test_some.py")


@pytest.mark.parametrize("line", ["tests/test_some.py::test_gone", "tests/test_some.py::test_numbers[3]", "tests/x.py"])
def test_a_line_that_names_nothing_is_found(project: pytest.Pytester, line: str) -> None:
    path: Path = project.path / LIST
    path.write_text(f"{path.read_text()}{line}\n")
    for word, found in (("tests/test_some.py", [line]), ("tests/test_some.py::test_short", [])):
        config = project.parseconfigure(word)
        tiers = Tiers(config)
        items, _ = project.inline_genitems(word)
        tiers.pytest_collection_modifyitems(config, items)
        assert tiers.matching_nothing == found

"""A plugin of pytest that writes down what each test takes and which points it reaches, as lines of JSON.

    {"test": ..., "outcome": "passed", "wall_s": ..., "cpu_s": ..., "reached": "1f03...", "uses": ["tests...(...)"]}
    {"shared": "tests.support.ranks.differences('over', 'rules', 2)", "cpu_s": ..., "reached": ..., "uses": [...]}
    {"collected": "3c"}

Several tests may share what the first of them computes: a function of the tests with a cache, a fixture of a module.
That is a row of its own, which the tests that ask for it name: none of them is cheaper than the others, or reaches
more, because another one came first. A test's own figures are without it. `reached` has a bit for each point, as a
hexadecimal number. Processor time is this process's own and that of the processes of the test that end by themselves.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.mutants.reached import read_reached

__all__: list[str] = []

_rows = Path(os.environ.get("MUTANTS_ROWS", "rows.jsonl"))
_done = frozenset(Path(os.environ["MUTANTS_DONE"]).read_text().split("\n") if "MUTANTS_DONE" in os.environ else ())


class _Scope:
    """What a test, or something that tests share, reaches and takes."""

    def __init__(self, number: int) -> None:
        self.file = _rows.with_name(f"{_rows.stem}.{os.getpid()}.{number}.reached")
        self.uses: list[str] = []
        self.wall_s = self.cpu_s = 0.0
        self._began = (0.0, 0.0)

    def resume(self) -> None:
        os.environ["MUTANTS_REACHED"] = str(self.file)
        _renew()
        self._began = (time.monotonic(), time.process_time())

    def pause(self) -> None:
        self.wall_s += time.monotonic() - self._began[0]
        self.cpu_s += time.process_time() - self._began[1]

    def figures(self) -> dict[str, Any]:
        found = read_reached(self.file, without_cpu_of=os.getpid())
        self.file.unlink(missing_ok=True)
        return {
            "wall_s": round(self.wall_s, 4),
            "cpu_s": round(self.cpu_s + found.cpu_s, 4),
            "reached": f"{found.mask:x}",
            "uses": self.uses,
        }


class _Recorder:
    """The scopes that are open: a test, and in it what it fills for others too."""

    def __init__(self) -> None:
        self._open: list[_Scope] = []
        self._num_scopes = 0

    def begin(self) -> None:
        if self._open:
            self._open[-1].pause()
        self._open.append(_Scope(self._num_scopes))
        self._num_scopes += 1
        self._open[-1].resume()

    def end(self, row: dict[str, Any]) -> None:
        scope = self._open.pop()
        scope.pause()
        _write({**row, **scope.figures()})
        if self._open:
            self._open[-1].resume()
        else:
            os.environ.pop("MUTANTS_REACHED", None)

    def use(self, name: str) -> None:
        if self._open and name not in self._open[-1].uses:
            self._open[-1].uses.append(name)


_recorder = _Recorder()
_outcomes: dict[str, str] = {}
_WORSE = ("passed", "skipped", "failed")


class _Cached:
    """A function of the tests with a cache."""

    def __init__(self, function: Any) -> None:
        self._function = function
        functools.update_wrapper(self, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return self._function(*args, **kwargs)
        words = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        name = f"{self._function.__module__}.{self._function.__qualname__}({', '.join(words)})"
        _recorder.use(name)
        num_misses = self._function.cache_info().misses
        _recorder.begin()
        try:
            return self._function(*args, **kwargs)
        finally:
            is_filled = self._function.cache_info().misses != num_misses
            _recorder.end({"shared": name} if is_filled else {})


def pytest_configure(config: pytest.Config) -> None:
    os.environ["MUTANTS_REACHED"] = str(_rows.with_name(f"{_rows.stem}.{os.getpid()}.collected"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what has a row."""
    left = [item for item in items if item.nodeid not in _done]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in _done])
    items[:] = left


def pytest_collection_finish(session: pytest.Session) -> None:
    file = Path(os.environ.pop("MUTANTS_REACHED"))
    _write({"collected": f"{read_reached(file).mask:x}"})
    file.unlink(missing_ok=True)
    known: dict[int, _Cached] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "tests":
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, functools._lru_cache_wrapper) and str(value.__module__).startswith("tests."):
                setattr(module, attribute, known.setdefault(id(value), _Cached(value)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    _rows.with_suffix(".current").write_text(item.nodeid)
    _recorder.begin()
    fixtures = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    for definitions in fixtures.values():
        if definitions and definitions[-1].scope != "function" and definitions[-1].baseid:
            _recorder.use(_name_of(definitions[-1]))
    try:
        return (yield)
    finally:
        _recorder.end({"test": item.nodeid, "outcome": _outcomes.pop(item.nodeid, "failed")})


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, Any, Any]:
    if fixturedef.scope == "function" or not fixturedef.baseid:
        return (yield)
    _recorder.begin()
    try:
        return (yield)
    finally:
        _recorder.end({"shared": _name_of(fixturedef)})


def pytest_sessionfinish() -> None:
    """A process that ends in a test leaves this file behind."""
    _rows.with_suffix(".current").unlink(missing_ok=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The worst of the outcomes of setup, call and teardown."""
    _outcomes[report.nodeid] = max(_outcomes.get(report.nodeid, "passed"), report.outcome, key=_WORSE.index)


def _name_of(definition: Any) -> str:
    return f"{definition.baseid}::{definition.argname}"


def _renew() -> None:
    switch = sys.modules.get("farspan._faults")
    if switch is not None:
        switch.renew()


def _write(row: dict[str, Any]) -> None:
    if "shared" in row or "test" in row or "collected" in row:
        with _rows.open("a") as file:
            file.write(json.dumps(row) + "\n")

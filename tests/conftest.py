"""What pytest must know of this folder."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from tests.support.warm import servers
from tests.tiers.tiers import LIST, Tiers

# Most tests are about what is recorded, also in one process; tests/alone is about one that records nothing.
os.environ["FARSPAN_RECORD"] = "1"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test finds on disk does not depend on the others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def no_engine_is_left() -> Iterator[None]:
    """A test that distributes a model leaves this thread, and what finds the recorder of a module, as they were."""
    yield
    world = sys.modules.get("farspan.execute.process.world")
    engine = world.current_engine() if world is not None else None
    if world is not None and engine is not None:
        scope, modes = sys.modules["farspan.call.draws.scope"], sys.modules["farspan.torch_private"]
        modes.take_modes_of(engine.recorder)
        scope.active.recorder = None
        world.forget_engine()
    intercept = sys.modules.get("farspan.record.intercept")
    if intercept is not None:  # or every engine of every test stays, and each collection of garbage takes longer
        intercept._recorder_of_module.clear()
        sys.modules["farspan.record.parameters.gradient_property"]._recorders.clear()


collect_ignore_glob = ["programs/*"]  # run as programs of their own, with a rank

# A machine under load may stop for longer than any example should take.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")
# Hypothesis would parse each source file that is loaded, for numbers and words to try: seconds in each worker, and
# other examples in a worker that has loaded other files.
providers.is_local_module_file = lambda path: False

_LONGEST = ("test_coverage", "test_parity", "test_remat_processes", "test_wrong_use", "test_generation", "test_modes")
"""Files that take a minute and more: they begin first, so that none is left over for one worker at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=("quick", "all"), default="all", help=f"quick: without what {LIST} lists")


def pytest_configure(config: pytest.Config) -> None:
    """A worker of pytest-xdist uses the servers of the process that starts the workers."""
    config.pluginmanager.register(Tiers(config), "tiers")
    servers.use(getattr(config, "workerinput", {}).get("servers", []))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist is about to start a worker."""
    node.workerinput["servers"] = servers.open_to_others()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Collects with the collector of garbage at rest: it finds nothing, and took a third of the time.

    A worker, whose many tests need torch at some time, imports it first.
    """
    gc.disable()
    if hasattr(session.config, "workerinput"):
        servers.preload()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in _LONGEST)  # stable: files stay whole and in order


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Pytest and Python collect garbage several times at their end: what is left after the first is not looked at."""
    gc.collect()
    gc.freeze()

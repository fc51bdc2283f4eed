"""Doing something to a module of another package: at once if it is loaded, else while or right after it is."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported", "while_imported"]

_Action = Callable[[Any], None]
_Context = Callable[[], contextlib.AbstractContextManager[None]]


class _Watched:
    """A loader that adds an action before and after a module is loaded."""

    def __init__(self) -> None:
        self.contexts: list[_Context] = []
        self.actions: list[_Action] = []


class _Finder(MetaPathFinder):
    """Finds modules like those behind it in `sys.meta_path`, and acts on those that are watched."""

    def __init__(self) -> None:
        self.watched: dict[str, _Watched] = {}
        self._sought: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        watched = self.watched.get(fullname)
        if watched is None or fullname in self._sought:
            return None
        self._sought.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._sought.discard(fullname)
        if spec is not None and spec.loader is not None:
            _act_on_loading(spec.loader, watched)
        return spec


def _act_on_loading(loader: Any, watched: _Watched) -> None:
    load = loader.exec_module

    def load_and_act(module: ModuleType) -> None:
        with contextlib.ExitStack() as stack:
            for context in watched.contexts:
                stack.enter_context(context())
            load(module)
            for action in watched.actions:
                action(module)

    loader.exec_module = load_and_act  # of this one module: each has a loader of its own


_finder = _Finder()


def when_imported(name: str, action: _Action) -> None:
    """Call `action(module)` when module `name` has been imported; now, if it has been already."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    actions = _watch(name).actions
    if action not in actions:
        actions.append(action)


def while_imported(name: str, context: _Context) -> None:
    """Have module `name` loaded within `context()`; nothing, if it has been imported already."""
    if name not in sys.modules and context not in (contexts := _watch(name).contexts):
        contexts.append(context)


def _watch(name: str) -> _Watched:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    return _finder.watched.setdefault(name, _Watched())

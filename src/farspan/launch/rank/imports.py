"""Doing something to a module of another package: at once if it is loaded, else right after it is."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]

_Action = Callable[[Any], None]


class _Finder(MetaPathFinder):
    """Finds modules like those behind it in `sys.meta_path`, and acts on those that are waited for."""

    def __init__(self) -> None:
        self.actions: dict[str, list[_Action]] = {}
        self._sought: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        actions = self.actions.get(fullname)
        if actions is None or fullname in self._sought:
            return None
        self._sought.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._sought.discard(fullname)
        if spec is not None and spec.loader is not None:
            _act_after_loading(spec.loader, actions)
        return spec


def _act_after_loading(loader: Any, actions: Sequence[_Action]) -> None:
    load = loader.exec_module

    def load_and_act(module: ModuleType) -> None:
        load(module)
        for action in actions:
            action(module)

    loader.exec_module = load_and_act  # of this one module: each has a loader of its own


_finder = _Finder()


def when_imported(name: str, action: _Action) -> None:
    """Call `action(module)` when module `name` has been imported; now, if it has been already."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    actions = _finder.actions.setdefault(name, [])
    if action not in actions:
        actions.append(action)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)

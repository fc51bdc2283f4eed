"""What a module writes on itself and on the modules below it: attributes, as arguments and results of its calls.

    self.loss = balance(gates)         each call has one more result, and every rank's module gets it as `loss`
    self.state = f(self.state, x)      and one more argument: what `state` was before

Which attributes these are shows when a call changes them for the first time (those that hold functions, say, each rank
has for itself). A rank's modules hold what the program
may read, recorded values; the real ones take their place only while the call runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn

from farspan.lazy.metadata.template import can_describe

__all__ = [
    "Attributes",
    "attributes_of",
    "own_attributes",
    "put_attributes",
    "put_own_attributes",
    "real_attributes",
    "watched_attributes",
]

Attributes = dict[str, Any]
"""By "number of the module among the leaf's modules.name"."""

_ABSENT = object()
_CONTENTS = (list, dict, set)
_OF_TORCH = frozenset(nn.Module().__dict__) | {"_flat_weights", "_flat_weight_refs", "_all_weights"}


def attributes_of(modules: Sequence[nn.Module], keys: Collection[str]) -> Attributes:
    """Those of the attributes `keys` that are there, in the keys' order."""
    found: Attributes = {}
    for key in sorted(keys):
        module, name = _find(modules, key)
        if name in module.__dict__:
            found[key] = module.__dict__[name]
    return found


def put_attributes(modules: Sequence[nn.Module], keys: Collection[str], values: Attributes) -> None:
    """Let the modules have `values`, and no other of the attributes `keys`."""
    for key in keys:
        module, name = _find(modules, key)
        if key in values:
            module.__dict__[name] = values[key]
        else:
            module.__dict__.pop(name, None)


def own_attributes(module: nn.Module, *, is_copy: bool = True) -> Attributes:
    """All attributes of `module` that are not torch's own, by name; copies of its lists, dictionaries and sets."""
    found = {name: item for name, item in module.__dict__.items() if name not in _OF_TORCH}
    return {name: _copy(item) for name, item in found.items()} if is_copy else found


def put_own_attributes(module: nn.Module, values: Attributes) -> None:
    """Let `module` have `values`, and no other attribute that is not torch's own."""
    for name in [name for name in module.__dict__ if name not in _OF_TORCH]:
        del module.__dict__[name]
    module.__dict__.update(values)


@contextlib.contextmanager
def real_attributes(modules: Sequence[nn.Module], keys: Collection[str], values: Attributes) -> Iterator[None]:
    """Run a call with `values` as its modules' attributes; `values` becomes what it leaves of `keys`."""
    keys = list(dict.fromkeys([*values, *keys]))
    before = attributes_of(modules, keys)
    put_attributes(modules, keys, values)
    try:
        yield
        after = attributes_of(modules, keys)
        values.clear()
        values.update(after)
    finally:
        put_attributes(modules, keys, before)


@contextlib.contextmanager
def watched_attributes(modules: Sequence[nn.Module], values: Attributes, *, is_real: bool) -> Iterator[None]:
    """As `real_attributes`, and find out which other attributes the call changes: `values` has them too, then.

    Args:
        modules: The leaf's.
        values: The attributes known so far.
        is_real: Whether what no template describes may stay on the modules: it is the owner's, not a fake.
    """
    before = [dict(module.__dict__) for module in modules]
    contents = [
        {name: _copy(item) for name, item in attributes.items() if type(item) in _CONTENTS and name not in _OF_TORCH}
        for attributes in before
    ]
    given = list(values)
    put_attributes(modules, given, values)
    try:
        yield
    finally:
        values.clear()
        for number, (module, old, old_contents) in enumerate(zip(modules, before, contents, strict=True)):
            changed = [name for name, item in module.__dict__.items() if _is_changed(name, item, old, old_contents)]
            for name in dict.fromkeys([*(name for name in module.__dict__ if f"{number}.{name}" in given), *changed]):
                key, item = f"{number}.{name}", module.__dict__[name]
                if key in given:
                    values[key] = item
                elif can_describe(item):
                    values[key] = _copy(item)  # its old contents are about to be put back
                elif is_real:
                    old[name] = item
            for name in [name for name in module.__dict__ if name not in _OF_TORCH and name not in old]:
                del module.__dict__[name]
            module.__dict__.update((name, item) for name, item in old.items() if name not in _OF_TORCH)
            for name, content in old_contents.items():
                item = old[name]
                if type(item) is type(content):
                    item.clear()
                    item.extend(content) if isinstance(item, list) else item.update(content)
        for key in sorted(values):
            values[key] = values.pop(key)


def _copy(item: Any) -> Any:
    return type(item)(item) if type(item) in _CONTENTS else item


def _is_changed(name: str, item: Any, before: dict[str, Any], contents: dict[str, Any]) -> bool:
    if name in _OF_TORCH:
        return False
    then = before.get(name, _ABSENT)
    if then is not item:
        return not (type(item) is type(then) and type(item) in (bool, int, float, str) and item == then)
    if name not in contents:
        return False
    content = contents[name]
    if len(content) != len(item):
        return True
    if isinstance(item, dict):
        return any(key not in content or content[key] is not value for key, value in item.items())
    if isinstance(item, list):
        return any(now is not old for now, old in zip(item, content, strict=True))
    return item != content


def _find(modules: Sequence[nn.Module], key: str) -> tuple[nn.Module, str]:
    number, _, name = key.partition(".")
    return modules[int(number)], name

"""What a module writes on itself and on the modules below it: attributes, as arguments and results of its calls.

    self.loss = balance(gates)         each call has one more result, and every rank's module gets it as `loss`
    self.state = f(self.state, x)      and one more argument: what `state` was before

Which attributes these are shows when a call changes them for the first time. A rank's modules hold what the program
may read, recorded values; the real ones take their place only while the call runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn

__all__ = ["Attributes", "attributes_of", "put_attributes", "real_attributes", "watched_attributes"]

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
def watched_attributes(modules: Sequence[nn.Module], values: Attributes) -> Iterator[None]:
    """As `real_attributes`, and find out which other attributes the call changes: `values` has them too, then."""
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
        after: Attributes = {}
        for number, module in enumerate(modules):
            for name, item in module.__dict__.items():
                key = f"{number}.{name}"
                if key in given:
                    after[key] = item
                elif _is_changed(name, item, before[number], contents[number]):
                    after[key] = _copy(item)  # its old contents are about to be put back
            for name, content in contents[number].items():
                item = before[number][name]
                item.clear()
                item.extend(content) if isinstance(item, list) else item.update(content)
        for key in [*given, *after]:
            module, name = _find(modules, key)
            number = int(key.partition(".")[0])
            if name in before[number]:
                module.__dict__[name] = before[number][name]
            else:
                module.__dict__.pop(name, None)
        values.clear()
        values.update(sorted(after.items()))


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

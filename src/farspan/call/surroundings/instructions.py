"""What a function's code names and imports, read from its instructions without a list of objects for each of them.

`dis.get_instructions` makes an object per instruction; a program's first step reads tens of thousands of functions.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator

__all__ = ["global_names_in", "has_class_patterns", "imports_in"]

_OF_GLOBALS = frozenset(code for name, code in dis.opmap.items() if name.endswith(("_GLOBAL", "_NAME")))
_LOAD_GLOBAL, _IMPORT_NAME, _MATCH_CLASS = (dis.opmap[name] for name in ("LOAD_GLOBAL", "IMPORT_NAME", "MATCH_CLASS"))


def _instructions_of(code: types.CodeType) -> Iterator[tuple[int, int]]:
    """Yields (opcode, argument) of each instruction: pairs of bytes, where EXTENDED_ARG gives the next one more bits.

    What instructions cache between them is a row of zeros in `co_code`, which is no instruction of `dis.opmap` here.
    """
    data, above = code.co_code, 0
    for operation, argument in zip(data[::2], data[1::2], strict=True):
        if operation == dis.EXTENDED_ARG:
            above = (above | argument) << 8
        else:
            yield operation, above | argument
            above = 0


@functools.lru_cache(maxsize=4096)
def global_names_in(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of globals alone: `tensor.data` is not about a global `data`."""
    names, found = code.co_names, dict[str, None]()
    for operation, argument in _instructions_of(code):
        if operation in _OF_GLOBALS:  # the lowest bit of LOAD_GLOBAL says whether it is for a call
            found[names[argument >> 1 if operation == _LOAD_GLOBAL else argument]] = None
    return tuple(found)


def has_class_patterns(code: types.CodeType) -> bool:
    """Returns whether the code has a `match` on a class."""
    return _MATCH_CLASS in code.co_code[::2]


@functools.lru_cache(maxsize=4096)
def imports_in(code: types.CodeType, package: str | None) -> tuple[str, ...]:
    """Returns what a function's code imports while it runs, by name: modules, those that these lie in, and what is in
    them."""
    if _IMPORT_NAME not in code.co_code[::2]:
        return ()
    found: dict[str, None] = {}
    name, level = "", 0
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_CONST" and isinstance(each.argval, int):
            level = each.argval
        elif each.opname == "LOAD_SMALL_INT":
            level = each.arg or 0
        elif each.opname == "IMPORT_NAME":
            name = each.argval
            if level and package:
                name = ".".join(part for part in (package.rsplit(".", level - 1)[0], name) if part)
            parts = name.split(".")
            found.update(dict.fromkeys(".".join(parts[:count]) for count in range(1, len(parts) + 1)))
        elif each.opname == "IMPORT_FROM":
            found[f"{name}.{each.argval}"] = None
    return tuple(found)

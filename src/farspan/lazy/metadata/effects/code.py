"""The Python code that calls of modules run: their classes, and the functions that these can be seen to call."""

from __future__ import annotations

import functools
import sysconfig
import types
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

__all__ = [
    "ABSENT",
    "Code",
    "code_of",
    "code_of_kinds",
    "content_of",
    "functions_in",
    "globals_of",
    "module_attributes_of",
    "names_in",
    "texts_in",
]

ABSENT = object()
"""Stands for what a variable holds that is not bound."""
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_MOST_FUNCTIONS = 500

Code = tuple[list[type], list[types.FunctionType]]


def code_of(modules: Sequence[nn.Module]) -> Code:
    """The classes of `modules` that are not torch's, and the functions of their files, or of the program's, that they
    can call.
    """
    own = {item: None for module in modules for item in vars(module).values() if isinstance(item, types.FunctionType)}
    return code_of_kinds(dict.fromkeys(map(type, modules)), own)


def code_of_kinds(kinds: Iterable[type], own: Iterable[types.FunctionType]) -> Code:
    """As `code_of`, for modules of these classes that hold these functions themselves."""
    classes = {cls: None for kind in kinds for cls in kind.__mro__ if not _is_torchs(cls)}
    functions = {function: None for cls in classes for function in functions_in(cls)} | dict.fromkeys(own)
    stack = list(functions)
    while stack and len(functions) < _MOST_FUNCTIONS:
        function = stack.pop()
        near = [item for _, item in globals_of(function)]
        near += [content_of(cell) for cell in function.__closure__ or ()]
        near += [vars(module)[name] for module, name in module_attributes_of(function)]
        for item in near:
            if (
                isinstance(item, types.FunctionType)
                and item not in functions
                and (item.__module__ == function.__module__ or _is_of_program(item.__code__.co_filename))
            ):
                functions[item] = None
                stack.append(item)
    return list(classes), list(functions)


def functions_in(cls: type) -> list[types.FunctionType]:
    """The methods that a class itself has, those behind properties and the like among them."""
    found: list[types.FunctionType] = []
    for item in vars(cls).values():
        parts: list[Any] = [item]
        if isinstance(item, property):
            parts = [item.fget, item.fset]
        elif isinstance(item, (staticmethod, classmethod)):
            parts = [item.__func__]
        elif isinstance(item, functools.cached_property):
            parts = [item.func]
        found += [part for part in parts if isinstance(part, types.FunctionType)]
    return found


def _is_of_program(path: str | None) -> bool:
    """Whether a file belongs to the program, and neither to Python nor to an installed package."""
    return path is not None and not path.startswith((*_LIBRARIES, "<frozen"))


def _is_torchs(cls: type) -> bool:
    return cls is object or cls.__module__.startswith(("torch.", "typing", "abc"))


def names_in(function: types.FunctionType) -> dict[str, None]:
    """The names of globals and attributes in a function's code, with those of the functions inside it."""
    names: dict[str, None] = {}
    for code in _codes_of(function):
        names.update(dict.fromkeys(code.co_names))
    return names


def texts_in(function: types.FunctionType) -> list[str]:
    """The texts in a function's code: what `getattr` may be given."""
    return [item for code in _codes_of(function) for item in code.co_consts if isinstance(item, str)]


def _codes_of(function: types.FunctionType) -> list[types.CodeType]:
    found: list[types.CodeType] = []
    stack = [function.__code__]
    while stack:
        code = stack.pop()
        found.append(code)
        stack += [item for item in code.co_consts if isinstance(item, types.CodeType)]
    return found


def globals_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The global variables that a function's code names, with those of the functions inside it; not the modules."""
    table = function.__globals__
    names = [name for name in names_in(function) if name in table]
    return [(name, table[name]) for name in names if not isinstance(table[name], types.ModuleType)]


def module_attributes_of(function: types.FunctionType) -> list[tuple[types.ModuleType, str]]:
    """What a function's code may read of the program's modules that it names: `settings.flag`."""
    table, names = function.__globals__, names_in(function)
    modules = [table[name] for name in names if isinstance(table.get(name), types.ModuleType)]
    ours = [module for module in modules if _is_of_program(getattr(module, "__file__", None))]
    return [(module, name) for module in ours for name in names if name in vars(module)]


def content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return ABSENT

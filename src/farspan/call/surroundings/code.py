"""The Python code that calls of modules run: their classes, and the functions that these can be seen to call."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from farspan.call.surroundings.instructions import global_names_in, has_class_patterns, imports_in

__all__ = [
    "ABSENT",
    "Code",
    "code_of",
    "code_of_kinds",
    "content_of",
    "functions_in",
    "globals_of",
    "imported_by",
    "kinds_of",
    "matches_by_position",
    "module_attributes_of",
    "names_in",
    "names_read",
    "texts_in",
]

ABSENT = object()
"""Stands for what a variable holds that is not bound."""
_LIBRARIES = (
    *[f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")],
    __file__.removesuffix(os.path.join("call", "surroundings", "code.py")),
    "<frozen",
)
_PYTHON = (*[f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")], "<frozen")
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OF_TORCH = frozenset(vars(nn.Module()))
_CONTAINERS = (list, tuple, set, frozenset, deque)
_Cached: Any = functools._lru_cache_wrapper
_MOST_VISITED, _MOST_ELEMENTS = 2000, 50
_NOT_READING = frozenset({"__init__", "__new__", "__init_subclass__", "__repr__", "__del__", "__setstate__"})
"""Methods that name all attributes, and that no code calls to read one."""


class Code(NamedTuple):
    """Classes and functions in Python that a call of some modules can use."""

    classes: list[type]
    """Classes of modules, and other classes of the program that these name or hold objects of."""
    functions: list[types.FunctionType]


def code_of(modules: Sequence[nn.Module]) -> Code:
    """Returns the code that calls of `modules` run: of torch nothing, of other packages what lies in the same file."""
    return code_of_kinds(*kinds_of(modules))


def kinds_of(modules: Sequence[nn.Module]) -> tuple[tuple[type, ...], tuple[types.FunctionType, ...]]:
    """Returns the classes of modules, and the functions that they hold themselves, in lists and objects too."""
    functions: dict[types.FunctionType, None] = {}
    queue = deque(item for module in modules for name, item in vars(module).items() if name not in _OF_TORCH)
    seen: dict[int, Any] = {}
    while queue and len(seen) < _MOST_VISITED:
        item = queue.popleft()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, types.FunctionType):
            functions[item] = None
        elif isinstance(item, type):
            functions.update(dict.fromkeys(functions_in(item)))
        else:
            queue += _behind(item)
    return tuple(dict.fromkeys(map(type, modules))), tuple(functions)


def code_of_kinds(kinds: Iterable[type], own: Iterable[types.FunctionType]) -> Code:
    """Does as `code_of`, for modules of these classes that hold these functions themselves."""
    classes = {cls: None for kind in kinds for cls in kind.__mro__ if not _is_torchs(cls)}
    functions = {function: None for cls in classes for function in functions_in(cls)} | dict.fromkeys(own)
    files = {item.__module__ for item in (*classes, *functions)}
    queue: deque[Any] = deque(part for cls in classes for part in _parts_of_class(cls))
    for function in functions:
        queue += _near(function)
    seen: dict[int, Any] = {}
    while queue and len(seen) < _MOST_VISITED:
        item = queue.popleft()
        if id(item) in seen:
            continue
        seen[id(item)] = item  # kept, so that its id stays its own
        if isinstance(item, types.FunctionType):
            if item not in functions and (item.__module__ in files or _is_in_program(item.__module__)):
                functions[item] = None
                queue += _near(item)
        elif isinstance(item, type):
            for cls in [cls for cls in item.__mro__ if _is_class_of_program(cls, files) and cls not in classes]:
                classes[cls] = None
                functions.update(dict.fromkeys(functions_in(cls)))
                queue += _parts_of_class(cls)
                for function in functions_in(cls):
                    queue += _near(function)
        else:
            queue += _behind(item)
    return Code(list(classes), list(functions))


def _near(function: types.FunctionType) -> list[Any]:
    """Returns the globals, cells, names of files and defaults that a function can use."""
    near = [item for _, item in globals_of(function)]
    near += [content_of(cell) for cell in function.__closure__ or ()]
    near += [vars(module)[name] for module, name in module_attributes_of(function)]
    return [*near, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _behind(item: Any) -> Iterable[Any]:
    """Yields where an object may lead to more code."""
    if isinstance(item, types.MethodType):
        return (item.__func__, item.__self__)
    if isinstance(item, functools.partial):
        return (item.func, *item.args, *item.keywords.values())
    if isinstance(item, _Cached):
        return (item.__wrapped__,)
    if isinstance(item, _CONTAINERS):
        return [*itertools.islice(iter(item), _MOST_ELEMENTS)]
    if isinstance(item, dict):
        return [*itertools.islice(dict.values(item), _MOST_ELEMENTS)]
    if isinstance(item, (nn.Module, torch.Tensor, types.ModuleType)) or not _is_class_of_program(type(item), ()):
        return ()
    return (type(item), *getattr(item, "__dict__", {}).values())


def _parts_of_class(cls: type) -> list[Any]:
    return [item for name, item in vars(cls).items() if not (name.startswith("__") and name.endswith("__"))]


def functions_in(cls: type) -> list[types.FunctionType]:
    """Returns the methods that a class itself has, those behind properties and the like among them."""
    found = [part for item in vars(cls).values() for part in _functions_of(item)]
    return [part for part in found if not _is_made_by_python(part)]


def _functions_of(item: Any) -> list[types.FunctionType]:
    """Returns the functions behind what stands in a class."""
    parts: Iterable[Any] = (item,)
    if isinstance(item, property):
        parts = (item.fget, item.fset)
    elif isinstance(item, (staticmethod, classmethod, _Cached)):
        parts = (item.__wrapped__,)
    elif isinstance(item, (functools.cached_property, functools.partialmethod)):
        parts = (item.func,)
    elif isinstance(item, functools.singledispatchmethod):
        parts = (item.func, *item.dispatcher.registry.values())
    return [part for part in parts if isinstance(part, types.FunctionType)]


@functools.lru_cache(maxsize=1024)
def names_read(kind: type, names: frozenset[str]) -> frozenset[str]:
    """Returns the names that a class's own methods may read of its objects, where code calls what is among `names`.

    Of classes of the program all methods count; of those of Python and torch the ones that are called, by their names
    or by what Python calls itself, and what these call in turn.
    """
    found = set(names)
    waiting: list[tuple[str, types.FunctionType]] = []
    for cls in kind.__mro__[:-1]:
        own = set() if _is_torchs(cls) else set(functions_in(cls))
        for function in own:
            found.update(names_in(function), texts_in(function))
        waiting += [
            (name, function)
            for name, item in vars(cls).items()
            for function in _functions_of(item)
            if function not in own and name not in _NOT_READING and function.__code__.co_filename != "<string>"
        ]
    is_growing = True
    while is_growing:
        called = [each for each in waiting if each[0] in found or each[0].startswith("__")]
        waiting = [each for each in waiting if each not in called]
        for _, function in called:
            found.update(names_in(function), texts_in(function))
        is_growing = bool(called)
    return frozenset(found)


def _is_made_by_python(function: types.FunctionType) -> bool:
    """Returns whether it is of Python's own files, or made by them (a dataclass's `__init__`): what it reads stays."""
    path, name = function.__code__.co_filename, function.__name__
    if path == "<string>":
        return name.startswith("__") and name.endswith("__")
    return path.startswith(_PYTHON) and not any(part in path for part in _PACKAGES)


def _is_of_program(path: str | None) -> bool:
    """Returns whether a file belongs to the program, and neither to Python nor to an installed package."""
    return path is not None and not path.startswith(_LIBRARIES) and not any(part in path for part in _PACKAGES)


def _is_class_of_program(cls: type, files: Iterable[str]) -> bool:
    if _is_torchs(cls) or cls.__module__ == "builtins":
        return False
    return cls.__module__ in files or _is_in_program(cls.__module__)


def _is_in_program(name: str | None) -> bool:
    """Returns whether the module of this name is a file of the program, or a folder with such."""
    return _is_of_program(_path_of(sys.modules.get(name or "")))


def _path_of(module: Any) -> str | None:
    """Returns where a module lies: a file; of a package without one, its folder."""
    path: str | None = getattr(module, "__file__", None)
    folders = [*getattr(module, "__path__", ())] if path is None else []
    return os.path.join(folders[0], "") if folders else path


def _is_torchs(cls: type) -> bool:
    return cls is object or cls.__module__.split(".")[0] in ("torch", "typing", "abc", "farspan")


def names_in(function: types.FunctionType) -> tuple[str, ...]:
    """Returns the names of globals and attributes in a function's code, with those of the functions inside it."""
    return _names_and_texts_in(function.__code__)[0]


def texts_in(function: types.FunctionType) -> tuple[str, ...]:
    """Returns the texts in a function's code, in constant tuples too: what `getattr` may be given, and what `match`
    names."""
    return _names_and_texts_in(function.__code__)[1]


@functools.lru_cache(maxsize=4096)
def _names_and_texts_in(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names: dict[str, None] = {}
    texts: list[str] = []
    for part in _codes_in(code):
        names.update(dict.fromkeys(part.co_names))
        waiting: list[Any] = [*part.co_consts]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                texts.append(item)
            elif isinstance(item, (tuple, frozenset)):
                waiting += item
    return tuple(names), tuple(texts)


def imported_by(function: types.FunctionType) -> list[str]:
    """Returns the names of what a function imports while it runs, if it is of the program, or not loaded yet."""
    package = function.__globals__.get("__package__")
    names = dict.fromkeys(name for code in _codes_in(function.__code__) for name in imports_in(code, package))
    loaded = {
        name: next(part for part in _from_the_last(name) if part in sys.modules or "." not in part) for name in names
    }
    return [name for name, part in loaded.items() if part not in sys.modules or _is_in_program(part)]


def _from_the_last(name: str) -> Iterable[str]:
    """a.b.c, a.b, a"""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(len(parts), 0, -1))


def matches_by_position(function: types.FunctionType) -> bool:
    """Returns whether a function's code has a `match` on classes, which may read attributes that it does not name."""
    return any(has_class_patterns(code) for code in _codes_in(function.__code__))


@functools.lru_cache(maxsize=4096)
def _codes_in(code: types.CodeType) -> tuple[types.CodeType, ...]:
    """Returns a function's code and that of the functions inside it."""
    found: list[types.CodeType] = []
    stack = [code]
    while stack:
        code = stack.pop()
        found.append(code)
        stack += [item for item in code.co_consts if isinstance(item, types.CodeType)]
    return tuple(found)


def _globals_named(function: types.FunctionType) -> list[str]:
    table = function.__globals__
    names = dict.fromkeys(name for code in _codes_in(function.__code__) for name in global_names_in(code))
    return [name for name in names if name in table]


def globals_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Returns the global variables that a function's code names, with those of the functions inside it; not the
    modules."""
    table, names = function.__globals__, _globals_named(function)
    return [(name, table[name]) for name in names if not isinstance(table[name], types.ModuleType)]


def module_attributes_of(function: types.FunctionType) -> list[tuple[types.ModuleType, str]]:
    """Returns what a function's code may read of the program's modules that it names: `settings.rate`,
    `package.file.rate`."""
    names = [*names_in(function), *texts_in(function)]
    found: dict[tuple[types.ModuleType, str], None] = {}
    stack = [function.__globals__[name] for name in _globals_named(function)]
    stack += [sys.modules[name] for name in imported_by(function) if name in sys.modules]
    seen: dict[types.ModuleType, None] = {}
    while stack:
        module = stack.pop()
        if not isinstance(module, types.ModuleType) or module in seen:
            continue
        seen[module] = None
        if _is_of_program(_path_of(module)):
            here = [name for name in names if name in vars(module)]
            found.update(dict.fromkeys((module, name) for name in here))
            stack += [vars(module)[name] for name in here]
    return list(found)


def content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return ABSENT

"""How what two runs left compares: lines, files, tensors, generators, bit for bit; the first difference in words."""

from __future__ import annotations

import io
import pickle
import re
import sqlite3
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

__all__ = ["differing_files", "differing_lines", "differing_objects", "load_without_farspan"]

_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


def differing_lines(wanted: str, got: str) -> str:
    """The first line that differs, or nothing."""
    if wanted == got:
        return ""
    expected, found = wanted.splitlines(), got.splitlines()
    for number, (a, b) in enumerate(zip(expected, found, strict=False), 1):
        if a != b:
            return f"line {number}: {_short(b)} instead of {_short(a)}"
    return f"{len(found)} lines instead of {len(expected)}"


def differing_files(wanted: Path, got: Path) -> list[str]:
    """The differences between two folders: names, and the first difference in each file."""
    expected, found = _files(wanted), _files(got)
    differences = [f"file {name} is missing" for name in sorted(expected.keys() - found.keys())]
    differences += [f"file {name} is one too many" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        if difference := _differing_file(expected[name], found[name]):
            differences.append(f"file {name}: {difference}")
    return differences


def differing_objects(wanted: Any, got: Any) -> str:
    """The first place where two nested objects differ, or nothing: tensors bit for bit, dtypes, shared memory."""
    expected, found = list(_leaves(wanted)), list(_leaves(got))
    for (path, a), (other, b) in zip(expected, found, strict=False):
        if path != other:
            return f"{other} instead of {path}"
        if a != b:
            return f"{path}: {_difference(a, b)}"
    return "" if len(expected) == len(found) else f"{len(found)} values instead of {len(expected)}"


def load_without_farspan(data: bytes) -> Any:
    """What a file of torch.save or pickle holds. The program's own classes are stood in for; farspan's are an error."""
    modules = SimpleNamespace(Unpickler=_Unpickler, load=lambda file, **_: _Unpickler(file).load(), __name__="pickle")
    if zipfile.is_zipfile(io.BytesIO(data)):
        return torch.load(io.BytesIO(data), weights_only=False, pickle_module=modules)
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    _stand_ins: ClassVar[dict[tuple[str, str], type]] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name.partition(".")[0] == "farspan":
            raise pickle.UnpicklingError(f"needs {module_name}.{global_name}")
        if module_name == "__main__":
            return self._stand_ins.setdefault((module_name, global_name), type(global_name, (), {}))
        return super().find_class(module_name, global_name)


def _files(folder: Path) -> dict[str, Path]:
    return {str(file.relative_to(folder)): file for file in folder.rglob("*") if not file.is_dir()}


def _differing_file(wanted: Path, got: Path) -> str:
    expected, found = wanted.read_bytes(), got.read_bytes()
    if expected == found:
        return ""
    if expected.startswith(b"SQLite format 3"):
        return differing_lines(_dump(wanted), _dump(got))
    if expected.startswith(b"\x80") or _is_torch(expected):
        try:
            return differing_objects(load_without_farspan(expected), load_without_farspan(found))
        except (pickle.UnpicklingError, AttributeError, ImportError, RuntimeError, EOFError) as error:
            return f"cannot be loaded, {type(error).__name__}: {_short(error)}"
    try:
        return differing_lines(expected.decode(), found.decode()) or "other line ends"
    except UnicodeDecodeError:
        return f"other bytes ({len(found)} instead of {len(expected)})"


def _is_torch(data: bytes) -> bool:
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return False
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return any(name.endswith("data.pkl") for name in archive.namelist())


def _dump(file: Path) -> str:
    with closing(sqlite3.connect(file)) as connection:
        return "\n".join(connection.iterdump())


def _leaves(item: Any) -> Iterator[tuple[str, Any]]:
    yield from _walk(item, "", {}, {})


def _walk(item: Any, path: str, seen: dict[int, str], storages: dict[int, int]) -> Iterator[tuple[str, Any]]:
    """Every value below an object with its path; the second time that it is met, an object is where it was first."""
    if isinstance(item, torch.Tensor):
        yield path, _tensor(item, storages)
        return
    if isinstance(item, np.ndarray):
        yield path, ("array", str(item.dtype), item.shape, item.tobytes())
        return
    if item is None or isinstance(item, str | bytes | int | float | complex | np.generic | torch.dtype | torch.device):
        yield path, (type(item).__name__, repr(item))
        return
    if isinstance(item, type | FunctionType | MethodType) or type(item).__name__ == "builtin_function_or_method":
        yield path, getattr(item, "__qualname__", repr(item))
        return
    if not isinstance(item, tuple | frozenset):  # which of these are one object says nothing
        if id(item) in seen:
            yield path, ("the same as", seen[id(item)])
            return
        seen[id(item)] = path
    yield path, type(item).__qualname__
    if isinstance(item, Mapping):
        for key, value in item.items():
            yield from _walk(value, f"{path}[{_ADDRESS.sub('', repr(key))}]", seen, storages)
    elif isinstance(item, set | frozenset):
        yield path, sorted(map(repr, item))
    elif isinstance(item, list | tuple):
        for number, value in enumerate(item):
            yield from _walk(value, f"{path}[{number}]", seen, storages)
    for key, value in getattr(item, "__dict__", {}).items():
        yield from _walk(value, f"{path}.{key}", seen, storages)


def _tensor(item: torch.Tensor, storages: dict[int, int]) -> tuple[Any, ...]:
    kind = (type(item).__name__, str(item.dtype), tuple(item.shape), item.requires_grad)
    if item.layout != torch.strided:
        dense = item.detach().to_dense()
        return (*kind, str(item.layout), None, dense.contiguous().numpy().tobytes())
    storage = item.untyped_storage()
    shared = storages.setdefault(storage.data_ptr(), len(storages)) if storage.nbytes() else None
    data = item.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if item.numel() else b""
    return (*kind, "strided", shared, data)


def _difference(wanted: Any, got: Any) -> str:
    if isinstance(wanted, tuple) and isinstance(got, tuple) and len(wanted) == len(got) == 7 and wanted[:5] == got[:5]:
        if wanted[-1] != got[-1]:
            if wanted[1] == "torch.float32":
                a, b = (np.frombuffer(side[-1], dtype=np.float32) for side in (wanted, got))
                return f"values differ, by up to {np.abs(a - b).max():.1e} of {np.abs(a).max():.1e}"
            return "values differ"
        return "shares memory with another tensor"
    return f"{_short(got)} instead of {_short(wanted)}"


def _short(item: Any) -> str:
    text = repr(item) if not isinstance(item, str | Exception) else str(item)
    return text if len(text) < 100 else text[:97] + "..."

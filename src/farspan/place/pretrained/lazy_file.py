"""Replaces `safetensors.safe_open` while a model is built without data: its tensors have none either."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import safetensors
import torch

from farspan.place.deferred.construction import CONSTRUCTION
from farspan.place.deferred.guard import is_constructing
from farspan.place.deferred.recording import LEAST_BYTES
from farspan.place.pretrained.stored import Stored, read_stored, stored_in, torch_dtype
from farspan.torch_private import without_any_mode

__all__ = ["LazyFile", "files_without_data", "tensor_of"]


class _Read:
    """The operation that reads a tensor from its file."""

    def __call__(self, stored: Stored) -> torch.Tensor:
        return read_stored(stored)

    def __str__(self) -> str:
        return "read"


_READ = _Read()


def tensor_of(stored: Stored) -> torch.Tensor:
    """Returns a tensor of the program, whose data are read when they are needed; one that is small has them."""
    dtype = torch_dtype(stored)
    if dtype is None:
        return read_stored(stored)
    with without_any_mode():
        meta = torch.empty(stored.shape, dtype=dtype, device="meta")
        if stored.part is not None:
            meta = meta[stored.part].contiguous()
        if meta.numel() * meta.element_size() < LEAST_BYTES:
            return read_stored(stored).clone()
    tensor = CONSTRUCTION.new(meta.shape, meta.stride(), dtype)
    CONSTRUCTION.note(_READ, (stored,), {}, results=[CONSTRUCTION.view_of(tensor)])
    return tensor


class LazyFile:
    """A safetensors file that gives tensors without data."""

    def __init__(self, path: str, file: Any) -> None:
        self._file = file
        self._stored = stored_in(path, file)

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.__exit__(*raised)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        return tensor_of(self._stored[name]) if name in self._stored else self._file.get_tensor(name)

    def get_slice(self, name: str) -> Any:
        return _LazySlice(self._stored[name]) if name in self._stored else self._file.get_slice(name)


class _LazySlice:
    """A tensor of the file of which a part may be taken."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def get_shape(self) -> list[int]:
        return list(self._stored.shape)

    def get_dtype(self) -> str:
        return self._stored.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        is_all = index is Ellipsis or (type(index) is slice and index == slice(None))
        return tensor_of(self._stored if is_all else replace(self._stored, part=index))


@contextlib.contextmanager
def files_without_data() -> Iterator[None]:
    """Gives tensors without data, in the body, to whoever opens a safetensors file in a constructor.

    transformers reads files in threads of its own, where no constructor is seen: for the body it does not.
    """
    opened: Any = safetensors.safe_open

    def safe_open(filename: Any, framework: Any, device: Any = "cpu", **options: Any) -> Any:
        file = opened(filename, framework=framework, device=device, **options)
        is_torch = str(framework) in ("pt", "torch", "pytorch") and str(device) == "cpu"
        return LazyFile(os.path.abspath(filename), file) if is_torch and is_constructing() else file

    users = [module for module in list(sys.modules.values()) if vars(module).get("safe_open") is opened]
    before = os.environ.get(_WITHOUT_THREADS)
    os.environ[_WITHOUT_THREADS] = "1"
    try:
        for module in users:
            module.safe_open = safe_open  # type: ignore[attr-defined]
        yield
    finally:
        for module in list(sys.modules.values()):
            if vars(module).get("safe_open") is safe_open:
                module.safe_open = opened  # type: ignore[attr-defined]
        if before is None:
            del os.environ[_WITHOUT_THREADS]
        else:
            os.environ[_WITHOUT_THREADS] = before


_WITHOUT_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"

"""How `torch.save` writes: a function pickles an object, and then gives its memory to a writer, piece after piece."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["address_of_storage", "watch_saving"]

_Around = Callable[[Any], contextlib.AbstractContextManager[object]]
"""From a storage, within what its data are written."""


def address_of_storage(storage: Any) -> int:
    """Returns the address by which memory is known, whatever object stands for it."""
    return storage._cdata


def watch_saving(saving: Callable[[], contextlib.AbstractContextManager[object]], writing: _Around) -> None:
    """Let every `torch.save` in today's format run within `saving`, and write each storage within `writing`."""
    module: Any = torch.serialization
    original = module._save

    def save(obj: Any, zip_file: Any, *args: Any, **kwargs: Any) -> None:
        with saving():
            original(obj, _Writer(zip_file, writing), *args, **kwargs)

    module._save = save


class _Writer:
    """A writer of torch's, which writes each storage within something."""

    def __init__(self, writer: Any, writing: _Around) -> None:
        self._writer = writer
        self._writing = writing

    def write_record(self, name: str, data: Any, *args: Any) -> None:
        with self._writing(data) if isinstance(data, torch.UntypedStorage) else contextlib.nullcontext():
            self._writer.write_record(name, data, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

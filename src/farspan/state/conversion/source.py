"""Tensors that are read one by one, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from farspan.state.format.dtypes import num_bytes

__all__ = ["Entry", "Source", "pieces_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The form of a tensor, known without reading it.

    Attributes:
        dtype: As torch calls it: "float32".
        shape: Its sizes.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return num_bytes(self.dtype, self.shape)


class Source(AbstractContextManager["Source"], Protocol):
    """Tensors that can be read; to be used as a context."""

    @property
    def path(self) -> str:
        """Returns where it lies, for people."""
        ...

    @property
    def tensors(self) -> Mapping[str, Entry]:
        """Returns the form of each tensor, by name, in the order of the file."""
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """Returns other names of these tensors."""
        ...

    def read(self, name: str, view: memoryview) -> None:
        """Read a tensor into memory of just its size, in row-major order.

        Raises:
            CheckpointError: It is damaged.
        """
        ...


def pieces_of(source: Source, name: str, memory: bytearray) -> Iterator[memoryview]:
    """Yields the bytes of a tensor, read when they are asked for; `memory` has room for it, and is used again for the
    next."""
    size = source.tensors[name].size_bytes
    view = memoryview(memory)[:size]
    source.read(name, view)
    yield view

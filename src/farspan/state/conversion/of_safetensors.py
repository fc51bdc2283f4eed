"""Plain safetensors files as a source: one, several with an index, or all in a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from farspan.documents import as_object, as_text, parse_json
from farspan.errors import CheckpointError
from farspan.state.conversion.source import Entry
from farspan.state.format import disk

__all__ = ["INDEX", "SafetensorsSource"]

INDEX = "model.safetensors.index.json"
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32",
    "F32": "float32", "I64": "int64", "U64": "uint64", "F64": "float64", "C64": "complex64",
}  # fmt: skip


class SafetensorsSource:
    """Tensors of safetensors files.

    Args:
        path: A file, or a folder of files.

    Raises:
        CheckpointError: It is none, or its index names what is not there.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.aliases: Mapping[str, str] = {}
        self.tensors: dict[str, Entry] = {}
        self._files: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()
        try:
            for file in _files_of(path):
                self._open(file)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def read(self, name: str, view: memoryview) -> None:
        """Read a tensor."""
        from farspan.comm.tensor_bytes import buffer_of

        view[:] = buffer_of(self._files[name].get_tensor(name).contiguous())

    def _open(self, file: str) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            opened: Any = self._stack.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is no safetensors file.", why=str(error)[:200]) from None
        for name in opened.keys():  # noqa: SIM118 - it is no dictionary
            part = opened.get_slice(name)
            if part.get_dtype() not in _DTYPES:
                raise CheckpointError(f"{name} in {file} has an unknown dtype.", why=f"{part.get_dtype()}.")
            if name in self.tensors:
                raise CheckpointError(f"{name} is in two files of {self.path}.", hint="one of the files")
            self.tensors[name] = Entry(dtype=_DTYPES[part.get_dtype()], shape=tuple(part.get_shape()))
            self._files[name] = opened


def _files_of(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    index = f"{path}/{INDEX}"
    if os.path.exists(index):
        entries = as_object(parse_json(disk.read_small(index), index), index, needed=("weight_map",))
        named = as_object(entries["weight_map"], index)
        names = list(dict.fromkeys(as_text(item, index) for item in named.values()))
        if not all(name == os.path.basename(name) for name in names):
            raise CheckpointError(f"{index} names a file in another folder.", hint="the files in one folder")
    else:
        names = [name for name in disk.names_in(path) if name.endswith(".safetensors")]
    if not names:
        raise CheckpointError(
            f"{path} holds no safetensors file.", hint="a checkpoint, or a folder of safetensors files"
        )
    return [f"{path}/{name}" for name in names]

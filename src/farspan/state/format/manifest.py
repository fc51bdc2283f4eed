"""The manifest of a checkpoint: what it holds, and where.

    tensor  "model/blocks.3.weight"  float32 [512, 128]
      piece   file 1, from byte 4096    rows 0 to 256        a checksum for each block of 16 MiB
      piece   file 2, from byte 8192    rows 256 to 512

A tensor is whole in one piece, or several that cover it. Names of tensors begin with what they are of: "model/",
"optimizer/", "extra/" (`state` says in full what each is for).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farspan.state.format.dtypes import num_bytes

__all__ = ["Manifest", "Piece", "StoredFile", "StoredTensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor, in row-major order without gaps, in one file.

    Attributes:
        file: Which of the manifest's files.
        begin: Its first byte there.
        offset: Of the box in the tensor, for each dim.
        shape: Of the box.
        checksums: Of its blocks (`checksum.blocks_of`).
    """

    file: int
    begin: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    checksums: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor.

    Attributes:
        dtype: As torch calls it: "float32".
        shape: Of the whole.
        pieces: They cover it, and do not overlap.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        return num_bytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A safetensors file.

    Attributes:
        name: In the checkpoint's folder.
        size_bytes: All of it.
        header_bytes: What comes before the first tensor.
        header_checksum: Of these.
    """

    name: str
    size_bytes: int
    header_bytes: int
    header_checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint.

    Attributes:
        save_id: Of the save that made it; each of its files has it too.
        step: The program's number.
        serial: How many saves into the same folder came before it.
        files: Of the ranks.
        tensors: By name.
        state: What is no tensor, as JSON has it (`state.values`).
        about: Versions, and the plan, for people.
    """

    save_id: str
    step: int
    serial: int
    files: tuple[StoredFile, ...]
    tensors: Mapping[str, StoredTensor]
    state: Any
    about: Mapping[str, Any]

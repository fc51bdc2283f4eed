"""A manifest as text: JSON, whose first member is the checksum of the bytes of its second one.

{"checksum": "9f3c...",
"manifest": {"format": "farspan checkpoint 1", "save_id": ..., "files": [...], "tensors": {...}, ...}}

file     [name, size, bytes of the header, checksum of the header]
tensor   [dtype, shape, pieces]
piece    [file, begin, offset, shape, [checksum of each block]]
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from farspan.documents import as_count, as_list, as_name, as_object, as_text, parse_json
from farspan.errors import CheckpointError, DamageError, PlanError
from farspan.state.format.checksum import blocks_of, checksum_of
from farspan.state.format.dtypes import ITEM_BYTES, num_bytes
from farspan.state.format.manifest import Manifest, Piece, StoredFile, StoredTensor

__all__ = ["FORMAT", "head_in", "is_file_name", "manifest_from_text", "manifest_to_text"]

FORMAT = "farspan checkpoint 1"
_HEAD, _MIDDLE, _END = b'{"checksum": "', b'",\n"manifest": ', b"}\n"
_KEYS = ("format", "save_id", "step", "serial", "files", "tensors", "state", "about")
_MOST = 2**62
_MOST_HEADER_BYTES = 2**30
"""It is read into memory before anything is known of the file."""
_BEGIN = re.compile(rb'\{"format":"[^"\\]*","save_id":"([0-9A-Za-z]*)","step":[0-9]{1,20},"serial":([0-9]{1,18}),')
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def is_file_name(name: str) -> bool:
    """Returns whether a checkpoint's file may be called so: it lies in the checkpoint's folder."""
    return _FILE_NAME.fullmatch(name) is not None


def manifest_to_text(manifest: Manifest) -> bytes:
    files = [[item.name, item.size_bytes, item.header_bytes, item.header_checksum] for item in manifest.files]
    tensors = {
        name: [item.dtype, item.shape, [_piece_to_json(piece) for piece in item.pieces]]
        for name, item in manifest.tensors.items()
    }
    values = (FORMAT, manifest.save_id, manifest.step, manifest.serial, files, tensors, manifest.state, manifest.about)
    body = json.dumps(dict(zip(_KEYS, values, strict=True)), separators=(",", ":"), allow_nan=False).encode()
    return _HEAD + checksum_of(body).encode() + _MIDDLE + body + _END


def manifest_from_text(text: bytes, source: str) -> Manifest:
    """Raise unless `text` is what `manifest_to_text` gave, to the bit.

    Raises:
        CheckpointError: It is not; names `source`.
    """
    body = _body_of(text)
    if body is None:
        raise DamageError(
            f"{source} is damaged.",
            why="its bytes are not those that were written: the checksum is another one.",
            hint="farspan.load(..., strict=False), which takes the newest checkpoint that is whole",
        )
    try:
        return _manifest_from_json(parse_json(body, source), source)
    except PlanError as error:  # whoever wrote it has computed a right checksum
        raise CheckpointError(error.what, why=error.why, hint=error.hint) from None


def head_in(text: bytes) -> tuple[str, int] | None:
    """Returns the save's id and the serial in a manifest, without reading what comes after them; None if it is damaged.

    A folder has many checkpoints, of thousands of tensors each, and a save looks at all of them.
    """
    body = _body_of(text)
    found = None if body is None else _BEGIN.match(body)
    return None if found is None else (found[1].decode(), int(found[2]))


def _body_of(text: bytes) -> bytes | None:
    """Returns what the checksum is of; None if it is another one."""
    begin = len(_HEAD) + 16 + len(_MIDDLE)
    body, head = text[begin : -len(_END)], text[:begin]
    is_whole = head + _END == _HEAD + checksum_of(body).encode() + _MIDDLE + text[len(text) - len(_END) :]
    return body if is_whole else None


def _manifest_from_json(value: Any, source: str) -> Manifest:
    found = as_object(value, source, needed=("format",))
    if found["format"] != FORMAT:
        raise CheckpointError(
            f"{source} has another format: {as_text(found['format'], source)[:60]!r}.",
            why=f"this farspan reads {FORMAT!r}.",
            hint="the farspan that has written it",
        )
    as_object(found, source, known=_KEYS, needed=_KEYS)
    files = tuple([_file_from_json(item, f"{source}: files") for item in as_list(found["files"], source)])
    tensors = {
        name: _tensor_from_json(item, files, f"{source}: {name}")
        for name, item in as_object(found["tensors"], f"{source}: tensors").items()
    }
    return Manifest(
        save_id=as_name(found["save_id"], f"{source}: save_id"),
        step=as_count(found["step"], f"{source}: step"),
        serial=as_count(found["serial"], f"{source}: serial"),
        files=files,
        tensors=tensors,
        state=found["state"],
        about=as_object(found["about"], f"{source}: about"),
    )


def _piece_to_json(piece: Piece) -> list[Any]:
    return [piece.file, piece.begin, piece.offset, piece.shape, piece.checksums]


def _file_from_json(value: Any, where: str) -> StoredFile:
    name, size, header, checksum = as_list(value, where, length=4)
    if not is_file_name(as_name(name, where)):
        raise CheckpointError(f"{where}: {name[:100]!r} is no name of a file.", hint="another checkpoint")
    size = as_count(size, where, most=_MOST)
    return StoredFile(
        name=name,
        size_bytes=size,
        header_bytes=as_count(header, where, most=min(size, _MOST_HEADER_BYTES)),
        header_checksum=_checksum(checksum, where),
    )


def _tensor_from_json(value: Any, files: tuple[StoredFile, ...], where: str) -> StoredTensor:
    dtype, shape, pieces = as_list(value, where, length=3)
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where} has an unknown dtype.", why=f"{str(dtype)[:60]!r}.", hint="a newer farspan")
    sizes = _counts(shape, where)
    found = tuple([_piece_from_json(item, dtype, sizes, files, where) for item in as_list(pieces, where)])
    if sum(math.prod(piece.shape) for piece in found) != math.prod(sizes):
        raise CheckpointError(f"{where} is not whole.", why="its pieces do not cover it.", hint="another checkpoint")
    return StoredTensor(dtype=dtype, shape=sizes, pieces=found)


def _piece_from_json(
    value: Any, dtype: str, sizes: tuple[int, ...], files: tuple[StoredFile, ...], where: str
) -> Piece:
    file, begin, offset, shape, checksums = as_list(value, where, length=5)
    piece = Piece(
        file=as_count(file, where, most=len(files) - 1),
        begin=as_count(begin, where, most=_MOST),
        offset=_counts(offset, where),
        shape=_counts(shape, where),
        checksums=tuple([_checksum(item, where) for item in as_list(checksums, where)]),
    )
    size = num_bytes(dtype, piece.shape)
    is_inside = len(piece.offset) == len(piece.shape) == len(sizes) and all(
        first + length <= whole for first, length, whole in zip(piece.offset, piece.shape, sizes, strict=True)
    )
    if (
        not is_inside
        or piece.begin + size > files[piece.file].size_bytes
        or len(piece.checksums) != len([*blocks_of(size)])
    ):
        raise CheckpointError(f"{where}: a piece lies outside of the tensor or the file.", hint="another checkpoint")
    return piece


def _counts(value: Any, where: str) -> tuple[int, ...]:
    return tuple([as_count(item, where, most=_MOST) for item in as_list(value, where)])


def _checksum(value: Any, where: str) -> str:
    if _CHECKSUM.fullmatch(as_text(value, where)) is None:
        raise CheckpointError(f"{where}: {str(value)[:40]!r} is no checksum.", hint="another checkpoint")
    return value

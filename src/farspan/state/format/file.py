"""One safetensors file of a checkpoint: written in one pass, each block hashed on its way to the disk.

8 bytes         size of the header
header          JSON: names, dtypes, shapes and places of the tensors; padded, so that the data begin at 4096 * n
data            one tensor behind the other, those of the largest elements first
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from farspan.state.format import disk
from farspan.state.format.checksum import Checksum, blocks_of, checksum_of, chunks_of
from farspan.state.format.dtypes import ITEM_BYTES, in_file, num_bytes

__all__ = ["Part", "Written", "header_of", "write_file"]

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is to be one tensor of a file.

    Attributes:
        key: Its name there.
        dtype: As torch calls it.
        shape: Its sizes.
        data: Called when its turn comes; its bytes in row-major order, in pieces of any size.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Iterable[memoryview]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What `write_file` has written.

    Attributes:
        size_bytes: Of the file.
        header_bytes: What comes before the first tensor.
        header_checksum: Of these.
        begins: First byte of each part.
        checksums: Of the blocks of each part.
    """

    size_bytes: int
    header_bytes: int
    header_checksum: str
    begins: tuple[int, ...]
    checksums: tuple[tuple[str, ...], ...]


def header_of(parts: Sequence[Part], about: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """All that comes before the data, and the first byte of each part in the file."""
    order = sorted(range(len(parts)), key=lambda number: -ITEM_BYTES[parts[number].dtype])  # keeps all aligned
    begins, entries, at = [0] * len(parts), dict[str, object](), 0
    entries["__metadata__"] = {"format": "pt", **about}
    for number in order:
        part = parts[number]
        size = num_bytes(part.dtype, part.shape)
        dtype, shape = in_file(part.dtype, part.shape)
        entries[part.key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        begins[number], at = at, at + size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + begin for begin in begins]


def write_file(
    path: str, parts: Sequence[Part], about: Mapping[str, str], on_progress: Callable[[], object] = bool
) -> Written:
    """Write a new file, and let it be on the disk.

    Args:
        path: Of the file, which is not there yet.
        parts: Its tensors.
        about: Put into its header.
        on_progress: Called before each operation on the disk, with long ones in between.

    Raises:
        OSError: The disk is full, or fails.
        ValueError: A part has another size than its shape says.
    """
    header, begins = header_of(parts, about)
    checksums: list[tuple[str, ...]] = [()] * len(parts)
    file = disk.create(path)
    try:
        disk.write(file, header)
        size = len(header)
        for number in sorted(range(len(parts)), key=begins.__getitem__):
            part = parts[number]
            expected = num_bytes(part.dtype, part.shape)
            found: list[str] = []
            done = 0
            for block in _in_blocks(part.data(), expected):
                checksum = Checksum()
                for begin, end in chunks_of(len(block)):
                    checksum.update(block[begin:end])
                    on_progress()
                    disk.write(file, block[begin:end])
                found.append(checksum.hexdigest())
                done += len(block)
            if done != expected:
                raise ValueError(f"{part.key} has {done} bytes, and by its shape {expected}")
            checksums[number] = tuple(found)
            size += done
        on_progress()
        disk.fsync(file)
    finally:
        disk.close(file)
    return Written(
        size_bytes=size,
        header_bytes=len(header),
        header_checksum=checksum_of(header),
        begins=tuple(begins),
        checksums=tuple(checksums),
    )


def _in_blocks(data: Iterable[memoryview], size_bytes: int) -> Iterator[memoryview]:
    """The blocks of what comes in pieces: without a copy where a piece has all of a block."""
    lengths = (end - begin for begin, end in blocks_of(size_bytes))
    length, kept = next(lengths, 0), bytearray()
    for piece in data:
        left = piece.cast("B") if piece.nbytes else memoryview(b"")
        while left:
            if not kept and len(left) >= length > 0:
                yield left[:length]
                left, length = left[length:], next(lengths, 0)
                continue
            taken = left[: length - len(kept)] if length else left
            kept += taken
            left = left[len(taken) :]
            if length and len(kept) == length:
                yield memoryview(kept)
                kept, length = bytearray(), next(lengths, 0)
    if kept:
        yield memoryview(kept)

"""Checksums of what is stored: xxh3 of 64 bits, one for each block of a tensor, for slices to be verified."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

__all__ = ["BLOCK_BYTES", "CHUNK_BYTES", "Checksum", "blocks_of", "checksum_of", "chunks_of"]

BLOCK_BYTES = 16 * 2**20
CHUNK_BYTES = 2**19
"""What is hashed while it is still in the processor's cache: before it is written, or after it has been read."""

Checksum = xxhash.xxh3_64
"""Takes a block chunk by chunk: `update(chunk)`, then `hexdigest()`."""


def checksum_of(data: bytes | bytearray | memoryview) -> str:
    """16 hexadecimal digits.

    >>> checksum_of(b"abc")
    '78af5f94892f3950'
    """
    return xxhash.xxh3_64_hexdigest(data)


def blocks_of(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each block of so many bytes; none of nothing."""
    for begin in range(0, size_bytes, BLOCK_BYTES):
        yield begin, min(begin + BLOCK_BYTES, size_bytes)


def chunks_of(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each chunk of so many bytes."""
    for begin in range(0, size_bytes, CHUNK_BYTES):
        yield begin, min(begin + CHUNK_BYTES, size_bytes)

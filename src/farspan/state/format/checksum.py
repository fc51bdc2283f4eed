"""Checksums of what is stored: xxh3 of 64 bits, one for each block of a tensor, for slices to be verified."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

__all__ = ["BLOCK_BYTES", "blocks_of", "checksum_of", "checksums_of"]

BLOCK_BYTES = 16 * 2**20


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


def checksums_of(data: memoryview) -> tuple[str, ...]:
    """The checksum of each block."""
    return tuple([checksum_of(data[begin:end]) for begin, end in blocks_of(len(data))])

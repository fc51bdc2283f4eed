"""An answer on its way: a head, and a frame for each tensor, which is received into the memory that it keeps."""

from __future__ import annotations

import functools
import itertools
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from farspan.call.wire.checked import damaged
from farspan.comm.tensor_bytes import buffer_of, pack_tensor, size_of, unpack_tensor
from farspan.control.wire import Buffer, Frame, FrameReader, Header, ProtocolError, encode, send_all

__all__ = ["Answer", "encode_answer", "frames_of", "read_answer", "send_request"]

Answer = tuple[dict[str, Any], Sequence[torch.Tensor]]
"""The head of an answer, and its tensors."""

_MOST_BYTES = 1 << 44
"""Limit on the bytes of one tensor."""
_MOST_TENSORS = 1 << 20


def encode_answer(answer: Answer) -> list[Buffer]:
    """Returns the buffers of an answer: copies, which the owner's program does not write to."""
    body, tensors = answer
    buffers = encode({"body": body, "num_tensors": len(tensors)})
    for tensor in tensors:
        buffers += encode(*pack_tensor(tensor), max_payload=_MOST_BYTES)
    return buffers


def send_request(sock: socket.socket, request: dict[str, Any]) -> None:
    send_all(sock, encode({"pull": request}))


def frames_of(sock: socket.socket, reader: FrameReader) -> Iterator[Frame]:
    """Yields the frames that come over a connection, one by one, until it ends."""
    while True:
        yield from reader.read(sock)


def read_answer(
    sock: socket.socket, reader: FrameReader, memory: torch.Tensor | None = None
) -> tuple[Header, list[torch.Tensor]]:
    """Receives an answer: its head, and the tensors.

    Args:
        sock: A connection over which a request has gone.
        reader: Of this connection.
        memory: Where the only tensor of the answer goes, as bytes, [size]; each has memory of its own without it.

    Raises:
        RecordError: A tensor has other bytes than it says; none of them has been taken.
        ProtocolError, EOFError, OSError: The connection is of no use any more.
    """
    reader.place, reader.max_payload = _memory_for if memory is None else functools.partial(_there, memory), _MOST_BYTES
    try:
        return _take_answer(frames_of(sock, reader), memory)
    finally:
        reader.place = None  # it knows the memory, and stays as long as the connection


def _take_answer(frames: Iterator[Frame], memory: torch.Tensor | None) -> tuple[Header, list[torch.Tensor]]:
    head = next(frames).header
    number = head.get("num_tensors", 0)
    if type(number) is not int or not 0 <= number <= _MOST_TENSORS:
        raise ProtocolError(f"an answer of {str(number)[:40]} tensors")
    if memory is not None:
        if number != 1 and "error" not in head:
            raise damaged(f"{number} tensors for the memory of one")
        for frame in itertools.islice(frames, number):
            _check_size(frame.header, len(frame.payload))
        return head, [memory]
    return head, [unpack_tensor(frame.header, frame.payload) for frame in itertools.islice(frames, number)]


def _memory_for(header: Header, size: int) -> bytearray:
    _check_size(header, size)
    return bytearray(size)


def _there(memory: torch.Tensor, header: Header, size: int) -> memoryview:
    _check_size(header, size)
    if size != memory.numel():
        raise damaged(f"a tensor of {size} bytes for memory of {memory.numel()}")
    return buffer_of(memory)


def _check_size(header: Header, size: int) -> None:
    if size != size_of(header):
        raise damaged(f"{size} bytes for a tensor of {size_of(header)}")

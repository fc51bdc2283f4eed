"""A call or its result as frames: a head, and one for each tensor.

    head     {"id": 7, "call": "add", "plain": [1, "x"]}     where all arguments are single plain values; else
             {"id": 7, "call": "add", "num_tensors": 1}      and the structure of the arguments,
    tensor   {"dtype": "float32", "shape": [2, 3]}           and its bytes
    head     {"id": 7, "plain": 3}, {"id": 7, "num_tensors": 1} and a structure, or {"id": 7, "error": {...}}

Structures are those of `call.wire`: nothing is unpickled, and classes are those that this process's own program names.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from farspan.call.infer.entry import meta_of
from farspan.call.pytree.template import flatten, rebuild
from farspan.call.wire.checked import damaged
from farspan.call.wire.structure import NotPlainError, structure_from_json, structure_to_json
from farspan.comm.tensor_bytes import pack_tensor, size_of, unpack_tensor
from farspan.control.text import described
from farspan.control.wire import (
    MAX_PAYLOAD_BYTES,
    Buffer,
    Frame,
    FrameReader,
    Header,
    ProtocolError,
    encode,
)
from farspan.errors import RecordError

__all__ = [
    "GREETING",
    "SEND_BUFFER_BYTES",
    "Message",
    "MessageReader",
    "call_message",
    "error_message",
    "result_message",
]

GREETING = b"!"
"""Comes first: a connection without it was made with a process that had ended by then."""
SEND_BUFFER_BYTES = 4 << 20
"""What the system may keep of a message before the other end reads it; systems have limits of their own."""
_SINGLE = frozenset((type(None), bool, float))
_MOST_SINGLE, _LONGEST_TEXT, _LARGEST_INT = 16, 10_000, 1 << 63
"""What the head of a message holds at most; the rest goes as a structure."""
_MOST_BYTES = 1 << 44
"""Limit on the bytes of one tensor."""
_MOST_TENSORS = 1 << 20


@dataclass(slots=True)
class Message:
    """A call or a result that has come."""

    header: Header
    text: Buffer
    tensors: list[torch.Tensor] = field(default_factory=list)

    def value(self) -> Any:
        """Returns the arguments of a call, (positional, by keyword), or a result.

        Raises:
            RecordError: It is none, or names what this process's program does not have.
        """
        if "plain" in self.header:
            plain = self.header["plain"]
            return (plain, {}) if "call" in self.header and isinstance(plain, list) else plain
        template, metas = structure_from_json(bytes(self.text))
        if len(metas) != len(self.tensors):
            raise damaged(f"{len(self.tensors)} tensors for a structure of {len(metas)}")
        return rebuild(template, self.tensors)


def call_message(number: int, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Buffer]:
    """Returns the buffers of a call.

    Raises:
        RecordError: An argument cannot be sent.
    """
    if not kwargs and len(args) <= _MOST_SINGLE and all(map(_is_single, args)):
        return encode({"id": number, "call": method, "plain": args})
    return _with_structure({"id": number, "call": method}, (tuple(args), kwargs), f"an argument of {method}")


def result_message(number: int, method: str, result: Any) -> list[Buffer]:
    """Returns the buffers of a result.

    Raises:
        RecordError: It cannot be sent.
    """
    if _is_single(result):
        return encode({"id": number, "plain": result})
    return _with_structure({"id": number}, result, f"what {method} returns")


def error_message(number: int, error: BaseException) -> list[Buffer]:
    """Returns the buffers of an error: its texts."""
    return encode({"id": number, "error": {"type": type(error).__name__, **described(error)}})


class MessageReader:
    """Turns the bytes of one socket, blocking or not, into messages."""

    def __init__(self) -> None:
        self._frames = FrameReader(max_payload=_MOST_BYTES, place=_memory_for)
        self._message: Message | None = None
        self._num_missing = 0

    def read(self, sock: socket.socket) -> list[Message]:
        """Receives once, and returns the messages that are whole by that.

        Raises:
            EOFError, OSError: The connection has ended.
            ProtocolError, RecordError: What has come is no message.
            BlockingIOError: A non-blocking socket had nothing.
        """
        found: list[Message] = []
        for frame in self._frames.read(sock):
            message = self._take(frame)
            if not self._num_missing:
                found.append(message)
                self._message = None
        return found

    def _take(self, frame: Frame) -> Message:
        if self._message is not None:
            self._message.tensors.append(unpack_tensor(frame.header, frame.payload))
            self._num_missing -= 1
            return self._message
        number = frame.header.get("num_tensors", 0)
        if type(number) is not int or not 0 <= number <= _MOST_TENSORS or type(frame.header.get("id")) is not int:
            raise ProtocolError("a call without a number, or of too many tensors")
        self._message, self._num_missing = Message(frame.header, frame.payload), number
        return self._message


def _memory_for(header: Header, size: int) -> bytearray:
    if "dtype" in header:
        if size_of(header) != size:
            raise ProtocolError(f"{size} bytes for a tensor of {size_of(header)}")
    elif size > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a structure of {size} bytes")
    return bytearray(size)


def _is_single(value: Any) -> bool:
    kind = type(value)
    return (
        kind in _SINGLE
        or (kind is int and -_LARGEST_INT < value < _LARGEST_INT)
        or (kind is str and len(value) <= _LONGEST_TEXT)
    )


def _with_structure(header: Header, value: Any, what: str) -> list[Buffer]:
    template, tensors = flatten(value)
    for tensor in tensors:
        _check(tensor, what)
    try:
        text = structure_to_json(template, list(map(meta_of, tensors)))
    except NotPlainError as error:
        raise _refused(
            f"{what} is, or holds, a {error.kind}",
            why="only tensors, numbers, strings, arrays, and what is made of them can be sent; code is not.",
            hint="lists, dictionaries and dataclasses of those",
        ) from None
    buffers = encode({**header, "num_tensors": len(tensors)}, text)
    for tensor in tensors:
        buffers += encode(*pack_tensor(tensor), max_payload=_MOST_BYTES)
    return buffers


def _check(tensor: torch.Tensor, what: str) -> None:
    if tensor.requires_grad:
        raise _refused(
            f"a tensor in {what} requires grad",
            why="no gradient comes back from another process.",
            hint="tensor.detach()",
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor) not in (torch.Tensor, nn.Parameter):
        raise _refused(
            f"a tensor in {what} is of class {type(tensor).__name__} and layout {tensor.layout}",
            why="only plain strided tensors can be sent.",
            hint="tensor.to_dense(); of a distributed model, torch.tensor(tensor.tolist())",
        )


def _refused(what: str, *, why: str, hint: str) -> RecordError:
    return RecordError(f"this cannot be sent to another process: {what}.", why=why, hint=hint)

"""What a stranger sends to a port: nonsense of many kinds, most of it close to what belongs there.

The forms of the messages are written down here once more, from their description, not taken from farspan.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

__all__ = ["GLOO", "HUB", "STORE", "framed", "hello"]

_PREFIX = struct.Struct("!4sIQ")
_LONGEST = 4000


def framed(header: bytes, *, magic: bytes = b"FSC1", header_size: int | None = None, payload_size: int = 0) -> bytes:
    """A frame of the side channel, with any header, and with sizes that need not be true."""
    size = len(header) if header_size is None else header_size
    return _PREFIX.pack(magic, size, payload_size) + header


def hello(rng: random.Random, num_ranks: int, /, **changed: Any) -> dict[str, Any]:
    """A hello as a rank says it, without the proof of the secret."""
    return {
        "t": "hello",
        "protocol": 3,
        "rank": rng.randrange(num_ranks),
        "world_size": num_ranks,
        "nonce": rng.randbytes(16).hex(),
        "proof": rng.randbytes(32).hex(),
        **changed,
    }


def _guess(rng: random.Random, world_size: int) -> bytes:
    return framed(json.dumps(hello(rng, world_size)).encode())


def _mutated(rng: random.Random, world_size: int) -> bytes:
    data = bytearray(_guess(rng, world_size))
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(data))
        change = rng.randrange(3)
        if change == 0:
            data[at] = rng.randrange(256)
        elif change == 1:
            data.insert(at, rng.randrange(256))
        else:
            del data[at]
    return bytes(data)


def _truncated(rng: random.Random, world_size: int) -> bytes:
    data = _guess(rng, world_size)
    return data[: rng.randrange(len(data))]


def _huge(rng: random.Random, world_size: int) -> bytes:
    header_size = rng.choice((None, 1 << 12, 1 << 20, (1 << 32) - 1))
    payload_size = rng.choice((1, 64 << 20, (64 << 20) + 1, 1 << 62, (1 << 64) - 1))
    return framed(json.dumps(hello(rng, world_size)).encode(), header_size=header_size, payload_size=payload_size)


def _deep(rng: random.Random, world_size: int) -> bytes:
    depth = rng.randint(100, _LONGEST // 2 - 200)
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"0}")))
    depth = min(depth, (_LONGEST - 300) // len(opening + closing))
    inner = opening * depth + (b"0" if opening != b"[" else b"") + closing.replace(b"0", b"") * depth
    text = json.dumps(hello(rng, world_size, **{rng.choice(("rank", "nonce", "proof", "world_size")): "HERE"})).encode()
    return framed(rng.choice((inner, text.replace(b'"HERE"', inner))))


def _surrogates(rng: random.Random, world_size: int) -> bytes:
    lone = rng.choice(("\ud800", "\udfff", "a\udc80b", "\x00", "\U0010ffff"))
    return framed(json.dumps(hello(rng, world_size, **{rng.choice(("nonce", "proof", "t", "rank")): lone})).encode())


def _other_types(rng: random.Random, world_size: int) -> bytes:
    anything = (None, True, [], {}, -1, 1.5, 1e308, float("nan"), float("inf"), 10**300, 1 << 64, "", "0", [[1]])
    changed = {
        name: rng.choice(anything) for name in rng.sample(("rank", "world_size", "nonce", "proof", "protocol"), 2)
    }
    return framed(json.dumps(hello(rng, world_size, **changed)).encode())


def _numbers(rng: random.Random, world_size: int) -> bytes:
    text = json.dumps(hello(rng, world_size, rank="HERE")).encode()
    number = rng.choice((b"9" * 3500, b"-0", b"1e400", b"1" + b"0" * 300, b"0x1", b"NaN", b"-Infinity"))
    return framed(text.replace(b'"HERE"', number))


def _orders(rng: random.Random, world_size: int) -> bytes:
    """What only a rank may say, without a hello or behind one that is refused."""
    orders = (
        {"t": "fail", "what": "a stranger's word", "why": "", "hint": "", "traceback": ""},
        {"t": "bye"},
        {"t": "finish", "step": 0, "digest": 0},
        {"t": "start", "step": 1 << 40, "digest": 1, "data": []},
        {"t": "request", "to": 0, "id": 0, "body": {"read": "x"}},
        {"t": "stack", "to": 0, "id": 0},
        {"t": "welcome", "proof": ""},
        {"t": "history", "query": 0},
    )
    data = framed(json.dumps(rng.choice(orders)).encode())
    return data if rng.random() < 0.5 else _guess(rng, world_size) + data * rng.randint(1, 20)


def _noise(rng: random.Random, world_size: int) -> bytes:
    http = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return rng.choice((rng.randbytes(rng.randint(1, 300)), http * rng.randint(1, 10), b"\x16\x03\x01\x02\x00\x01", b""))


def _other_frames(rng: random.Random, world_size: int) -> bytes:
    magic = rng.choice((b"FSC0", b"FSC2", b"\0\0\0\0", b"1CSF"))
    header = rng.choice((b"", b"[]", b"null", b'"hello"', b"{", b"{}" * 50, b"\xff" * 30))
    return framed(header, magic=rng.choice((magic, b"FSC1")))


HUB: dict[str, Callable[[random.Random, int], bytes]] = {
    "guess": _guess,
    "mutated": _mutated,
    "truncated": _truncated,
    "huge": _huge,
    "deep": _deep,
    "surrogates": _surrogates,
    "other types": _other_types,
    "numbers": _numbers,
    "orders": _orders,
    "noise": _noise,
    "other frames": _other_frames,
}


def _sequence_numbers(rng: random.Random, world_size: int) -> bytes:
    """gloo's listener reads a number of 8 bytes from each connection, and looks for the pair that waits for it."""
    return struct.pack("=q", rng.choice((0, 1, 2, 3, -1, rng.randrange(1 << 62))))


GLOO: dict[str, Callable[[random.Random, int], bytes]] = {
    "sequence numbers": _sequence_numbers,
    "short": lambda rng, world_size: rng.randbytes(rng.randrange(8)),
    "noise": _noise,
}

_VALIDATE = struct.pack("=BI", 0, 0x3C85F7CE)


def _store_set(rng: random.Random, world_size: int) -> bytes:
    """Writes to the store as any client may, without proving anything."""
    key, value = f"init/farspan/0/rank {rng.randrange(world_size)}".encode(), rng.randbytes(20)
    sizes = struct.pack("=Q", len(key)), struct.pack("=Q", len(value))
    return _VALIDATE + b"\x01" + sizes[0] + key + sizes[1] + value


def _store_huge(rng: random.Random, world_size: int) -> bytes:
    size = rng.choice((1 << 20, 1 << 33, 1 << 62, (1 << 64) - 1))
    return _VALIDATE + bytes([rng.randrange(16)]) + struct.pack("=Q", size) + rng.randbytes(8)


STORE: dict[str, Callable[[random.Random, int], bytes]] = {
    "orders": lambda rng, world_size: _VALIDATE + bytes([rng.randrange(256)]) + rng.randbytes(rng.randrange(40)),
    "set": _store_set,
    "huge": _store_huge,
    "noise": _noise,
}

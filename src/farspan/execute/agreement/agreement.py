"""Makes ranks agree on what all must have alike: the plan, the model, the random generators, what one of them found."""

from __future__ import annotations

import hashlib
import struct

import torch

from farspan.control.channel import SideChannel
from farspan.devices import accelerators, current_device, get_generator_state, is_accelerator, set_generator_state
from farspan.errors import DivergenceError
from farspan.execute.step.generator_states import load_generators, save_generators

__all__ = ["Agreement"]

_DIGEST_BYTES = 8
_MOST_SHOWN = 500
_FOUND = struct.Struct("<qQQ")
"""The number of the first line that differs, or -1, and how many lines rank 0 and the other rank have."""


class Agreement:
    """Comparisons that all ranks make together, at the same places of the program."""

    def __init__(self, side: SideChannel, deadline_s: float) -> None:
        self.side = side
        self.deadline_s = deadline_s
        self.names: set[str] = set()
        """Names of classes that another rank has named, and that all ranks have."""
        self._number = 0

    def barrier(self, what: str) -> None:
        """Wait until all ranks have come here."""
        self.gather(what, b"")

    def agree_on(self, what: str, text: str) -> None:
        """Raise on every rank if the ranks' `text` differs.

        Raises:
            DivergenceError: With the first line that differs.
        """
        digests = self.gather(what, _digest(text))
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is None:
            return
        lines = text.splitlines() if self.side.rank in (0, other) else []
        at, counts = self._first_difference(what, lines, other)
        line = lines[at].strip() if at is not None and lines else ""
        shown = [blob.decode(errors="replace") for blob in self.gather("the line", line.encode()[:_MOST_SHOWN])]
        raise DivergenceError(
            f"ranks 0 and {other} call farspan.distribute with different {what}s.",
            why=f"rank 0 has {counts[0]} entries, rank {other} has {counts[1]}"
            if at is None
            else f"rank 0: {shown[0]}\nrank {other}: {shown[other]}",
            hint="build the same model with the same arguments on every rank",
        )

    def _first_difference(self, what: str, lines: list[str], other: int) -> tuple[int | None, tuple[int, int]]:
        """Returns the number of the first of the `lines` that differs between rank 0 and rank `other`, None if one text
        goes on where the other ends, and how many lines each has.

        The texts may be long and the ranks many: rank 0 alone gets a few bytes of each line of the other rank.
        """
        digests = b"".join(map(_digest, lines))
        theirs = self.gather_at(0, f"lines of the {what}", digests if self.side.rank == other else b"")
        found = b""
        if theirs:
            pairs = enumerate(zip(_split(digests), _split(theirs[other]), strict=False))
            at = next((number for number, (our, their) in pairs if our != their), -1)
            found = _FOUND.pack(at, len(lines), len(theirs[other]) // _DIGEST_BYTES)
        at, ours, others = _FOUND.unpack(self.broadcast(f"first difference of the {what}", found, 0))
        return (None if at < 0 else at), (ours, others)

    def share_generators(self) -> None:
        """Give all ranks rank 0's random generators, so that shuffling and random choices agree."""
        if self.side.world_size == 1:
            return
        is_first = self.side.rank == 0
        load_generators(self.gather("generators", save_generators() if is_first else b"")[0])
        own = current_device()
        has_device = is_first and is_accelerator(own)
        state = self.gather("devices' generators", bytes(get_generator_state(own).numpy()) if has_device else b"")[0]
        if state:
            for device in accelerators():
                set_generator_state(device, torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def broadcast(self, what: str, blob: bytes, source: int) -> bytes:
        """Returns on every rank what rank `source` gives as `blob`; what others give does not matter."""
        if self.side.world_size == 1:
            return blob
        return self.gather(what, blob if self.side.rank == source else b"")[source]

    def gather(self, what: str, blob: bytes) -> list[bytes]:
        """Returns what all ranks give as `blob`, by rank."""
        return self._gather(what, blob, None)

    def gather_at(self, rank: int, what: str, blob: bytes) -> list[bytes]:
        """Returns the same on `rank`; nothing on the others, which do not wait for it."""
        return self._gather(what, blob, rank)

    def _gather(self, what: str, blob: bytes, receiver: int | None) -> list[bytes]:
        key = f"{what} {self._number}"
        self._number += 1
        self.side.contribute(key, blob, receiver=receiver)
        if receiver not in (None, self.side.rank):
            return []
        blobs = self.side.gathered(key, self.deadline_s)
        self.side.forget(key)
        return blobs


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def _split(digests: bytes) -> list[bytes]:
    return [digests[begin : begin + _DIGEST_BYTES] for begin in range(0, len(digests), _DIGEST_BYTES)]

"""What all ranks must have alike: the same plan, the same model, the same random generators, what one of them found."""

from __future__ import annotations

from farspan.errors import DivergenceError
from farspan.runtime.side import SideChannel
from farspan.runtime.step.rng import load_generators, save_generators

__all__ = ["Agreement"]


class Agreement:
    """Comparisons that all ranks make together, at the same places of the program."""

    def __init__(self, side: SideChannel, deadline_s: float) -> None:
        self.side = side
        self.deadline_s = deadline_s
        self._number = 0

    def meet(self, what: str) -> None:
        """Wait until all ranks have come here."""
        self.gather(what, b"")

    def agree_on(self, what: str, text: str) -> None:
        """Raise on every rank if the ranks' `text` differs.

        Raises:
            DivergenceError: With the first line that differs.
        """
        texts = self.gather(what, text.encode())
        for rank, other in enumerate(texts):
            if other != texts[0]:
                raise DivergenceError(
                    f"ranks 0 and {rank} call farspan.distribute with different {what}s.",
                    why=_first_difference(texts[0].decode(), other.decode(), rank),
                    hint="build the same model with the same arguments on every rank",
                )

    def share_generators(self) -> None:
        """Give all ranks rank 0's random generators, so that shuffling and random choices agree."""
        if self.side.world_size > 1:
            load_generators(self.gather("generators", save_generators() if self.side.rank == 0 else b"")[0])

    def tell(self, what: str, blob: bytes, teller: int) -> bytes:
        """What rank `teller` gives as `blob`, on every rank."""
        return self.gather(what, blob)[teller] if self.side.world_size > 1 else blob

    def gather(self, what: str, blob: bytes) -> list[bytes]:
        """What all ranks give as `blob`, by rank."""
        key = f"{what} {self._number}"
        self._number += 1
        self.side.contribute(key, blob)
        blobs = self.side.gathered(key, self.deadline_s)
        self.side.forget(key)
        return blobs


def _first_difference(ours: str, theirs: str, rank: int) -> str:
    for mine, other in zip(ours.splitlines(), theirs.splitlines(), strict=False):
        if mine != other:
            return f"rank 0: {mine.strip()}\nrank {rank}: {other.strip()}"
    return f"rank 0 has {len(ours.splitlines())} entries, rank {rank} has {len(theirs.splitlines())}"

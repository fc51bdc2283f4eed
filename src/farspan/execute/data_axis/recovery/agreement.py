"""Agreements of the ranks of all groups that outlive the loss of a group: those that are left agree again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.execute.agreement.agreement import Agreement

if TYPE_CHECKING:
    from farspan.control.channel import SideChannel
    from farspan.execute.data_axis.recovery.recovery import Recovery

__all__ = ["AgreementOfGroups"]


class AgreementOfGroups(Agreement):
    """The same comparisons, each of which ends on all ranks that are left or on none (`Recovery`).

    Args:
        side: The channel of all ranks.
        deadline_s: The longest wait for another rank.
        recovery: Of this rank.
    """

    def __init__(self, side: SideChannel, deadline_s: float, recovery: Recovery) -> None:
        super().__init__(side, deadline_s)
        self._recovery = recovery

    def _gather(self, what: str, blob: bytes, receiver: int | None) -> list[bytes]:
        def gather() -> list[bytes]:
            key = f"{what} in operation {self._recovery.num_committed}"
            self.side.contribute(key, blob)
            blobs = self.side.gathered(key, self.deadline_s)
            self.side.forget(key)
            return blobs

        blobs = self._recovery.together(gather)
        return blobs if receiver in (None, self.side.rank) else []

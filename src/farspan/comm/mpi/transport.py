"""CPU tensors between the ranks of an MPI communicator: one tag for each channel."""

from __future__ import annotations

from typing import Any

import torch

from farspan.comm.mpi.progress import Posted, Progress
from farspan.comm.tensor_bytes import buffer_of
from farspan.comm.transport import TransferError
from farspan.errors import PlanError

__all__ = ["MpiTransport"]

_MOST_BYTES = 1 << 30
"""A longer tensor goes as several messages: MPI counts in 32 bits."""


class MpiTransport:
    """Point-to-point transfers in a communicator of farspan's own.

    Args:
        comm: The communicator.
        progress: Looks after them.
        most_bytes: The longest message.
    """

    name = "MPI"

    def __init__(self, comm: Any, progress: Progress, most_bytes: int = _MOST_BYTES) -> None:
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.is_aborted = False
        self._comm = comm
        self._progress = progress
        self._most_bytes = most_bytes

    def send(self, flat: torch.Tensor, dst: int, channel: int) -> Posted:
        return self._begin(self._comm.Isend, flat, dst, channel, is_receive=False)

    def receive(self, flat: torch.Tensor, src: int, channel: int) -> Posted:
        return self._begin(self._comm.Irecv, flat, src, channel, is_receive=True)

    def checks_sizes(self, src: int) -> bool:
        return True  # a longer message is an error of MPI's, a shorter one is counted

    def abort(self) -> None:
        self._progress.abort(self)

    def close(self) -> None:
        """Nothing is sent or received afterwards."""
        self.abort()

    def _begin(self, call: Any, flat: torch.Tensor, peer: int, channel: int, *, is_receive: bool) -> Posted:
        if self.is_aborted:
            raise TransferError("connection aborted")
        _check_device(flat)
        mpi, memory = self._progress.mpi, buffer_of(flat)
        starts = range(0, len(memory), self._most_bytes) or range(1)
        parts = [memory[start : start + self._most_bytes] for start in starts]
        try:
            requests = [call([part if len(part) else None, len(part), mpi.BYTE], peer, channel) for part in parts]
        except mpi.Exception as error:
            raise TransferError(f"rank {peer} cannot be reached: {error.Get_error_string()}") from error
        sizes = list(map(len, parts)) if is_receive else []
        return self._progress.begin(Posted(self._progress, requests, sizes, flat, self, peer))


def _check_device(flat: torch.Tensor) -> None:
    if flat.device.type != "cpu":
        raise PlanError(
            f"a tensor on {flat.device} was to go to another rank over MPI.",
            why="comm= carries tensors of the CPU only; between GPUs farspan uses NCCL, which needs a store.",
            hint="farspan.distribute(model) without comm=, with MASTER_ADDR and MASTER_PORT set",
        )

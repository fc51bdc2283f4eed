"""The ranks of a program that has called MPI_Init, as its own communicator numbers them.

the program's communicator    nothing is sent in it: two of farspan's own are made of it, when all ranks have come
  small messages              the control plane, pulls                           `progress`, `side`, `streams`
  tensors                     of all ranks, or Split into those of each group    `transport`
  positions                   Split: the ranks that own the same parameters      `sums`
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from farspan import settings
from farspan.comm.collectives import HostCollectives
from farspan.comm.mpi.communicator import check_communicator, same_ranks
from farspan.comm.mpi.progress import Progress
from farspan.comm.mpi.side import Port, open_ends
from farspan.comm.mpi.sums import MpiCollectives
from farspan.comm.mpi.transport import MpiTransport
from farspan.comm.rendezvous.network import Gather
from farspan.comm.router import Router
from farspan.comm.same_host.copies import SameHostTransport
from farspan.control.channel import SideChannel
from farspan.control.groups.group_channel import GroupChannel
from farspan.control.link import LoopLink
from farspan.errors import DeadlineError, PlanError
from farspan.launch.rank.absent import note_coming
from farspan.launch.rank.process_end import at_process_end
from farspan.outputs import write_line

__all__ = ["MpiNetwork"]

_log = logging.getLogger(__name__)
_OF_ALL, _OF_GROUP = 0, 1
"""The side channels."""
_PAUSE_S = 1e-3
_ENDING_S = 5.0
"""How long a program that has failed waits for the others to end too."""


class MpiNetwork:
    """One rank among those of a communicator.

    Args:
        comm: The program's.

    Raises:
        PlanError: It is none that farspan can use.
    """

    launcher = "program"

    def __init__(self, comm: Any) -> None:
        self._mpi = check_communicator(comm)
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()
        self._process = os.getpid()
        self._keyval: int | None = None

    def check_same(self, comm: Any) -> None:
        """Raise an error if another communicator is given than the first time.

        Raises:
            PlanError: It has other ranks.
        """
        check_communicator(comm)
        if not same_ranks(self._mpi, self._comm, comm):
            raise PlanError(
                f"the ranks are those of another communicator: {self.world_size} then, {comm.Get_size()} now.",
                why="all models of a program are distributed over the ranks that the first one was.",
                hint="the same comm= in each call of farspan.distribute",
            )

    def join(self, limit_s: float) -> SideChannel:
        note_coming()
        messages, self._tensors = self._duplicates(limit_s)
        self._messages = messages
        self._progress = Progress(self._mpi, messages)
        link, hub = open_ends(Port(self._progress, _OF_ALL, 0, self.world_size))
        self._side = SideChannel(self.rank, self.world_size, link, hub)
        return self._side

    def open_router(self, gather: Gather, limit_s: float) -> Router:
        return _open_router(self.rank, self._tensors, self._progress, gather, limit_s)

    def divide(self, num_groups: int, gather: Gather, limit_s: float) -> tuple[GroupChannel, _GroupNetwork]:
        size = self.world_size // num_groups
        number = self.rank // size
        gather("groups of a communicator", b"")  # Split has no deadline: here all ranks come to it
        tensors = self._tensors.Split(number, self.rank)
        if size == 1:
            channel = GroupChannel(self._side, number, num_groups, LoopLink(), secret="")
        else:
            link, hub = open_ends(Port(self._progress, _OF_GROUP, number * size, size))
            channel = GroupChannel(self._side, number, num_groups, link, hub, secret="")
        return channel, _GroupNetwork(channel, tensors, self._progress)

    def owners(self, channel: GroupChannel, limit_s: float) -> HostCollectives:
        positions = self._tensors.Split(channel.rank, self.rank)
        return HostCollectives(MpiCollectives(MpiTransport(positions, self._progress)))

    def at_end(self, leave: Callable[[], None]) -> None:
        """Let `leave` be called at the end of the process, or when the program calls MPI_Finalize before."""
        at_process_end(leave)
        # MPI_Finalize ends COMM_SELF first, and calls what ends its attributes.
        self._keyval = self._mpi.Comm.Create_keyval(delete_fn=lambda comm, keyval, value: leave())
        self._mpi.COMM_SELF.Set_attr(self._keyval, leave)

    def close(self, *, is_over_well: bool, has_raised: bool) -> None:
        """Ends what is under way; where the program has failed, and others cannot hear of it, the job."""
        if os.getpid() != self._process:
            return
        if not is_over_well:
            have_heard = _is_done_in(self._messages.Ibarrier(), _ENDING_S)
            if has_raised and (not have_heard or self.world_size < self._mpi.COMM_WORLD.Get_size()):
                write_line(
                    f"farspan: rank {self.rank} has failed, and ends the job (MPI_Abort): other ranks would wait for "
                    "it in MPI for ever."
                )
                self._mpi.COMM_WORLD.Abort(1)
        self._progress.close()

    def _duplicates(self, limit_s: float) -> tuple[Any, Any]:
        """Returns two communicators of the same ranks, once all have come here."""
        made = [self._comm.Idup() for _ in range(2)]
        until = time.monotonic() + limit_s
        for comm, request in made:
            if not _is_done_in(request, until - time.monotonic()):
                raise DeadlineError(
                    f"rank {self.rank} waited {limit_s:g} s for the other {self.world_size - 1} ranks of its "
                    "communicator to call farspan.distribute",
                    why="one of them has not come to it: it has ended, is busy before it, has given no comm= or "
                    "another one.",
                    hint="let all ranks of comm call farspan.distribute(model, comm=comm), and no other;\n"
                    f"if it only takes longer: FARSPAN_DEADLINE={2 * limit_s:g}",
                )
            comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._open_contexts()
        return made[0][0], made[1][0]

    def _open_contexts(self) -> None:
        """Let mpi4py make what its reductions of Python objects need, now that all ranks are here.

        In the first `allreduce`, `reduce` or `scan` on a communicator it duplicates that, and holds Python's lock until
        all ranks have come: no thread of this rank would answer one that has still to read from it.
        """
        world = self._mpi.COMM_WORLD
        for comm in (self._comm, *([world] if same_ranks(self._mpi, self._comm, world) else [])):
            comm.allreduce(0)


class _GroupNetwork:
    """One rank among those of its group."""

    launcher = "program"

    def __init__(self, channel: GroupChannel, tensors: Any, progress: Progress) -> None:
        self.rank, self.world_size = channel.rank, channel.world_size
        self._tensors = tensors
        self._progress = progress

    def open_router(self, gather: Gather, limit_s: float) -> Router:
        return _open_router(self.rank, self._tensors, self._progress, gather, limit_s)


def _open_router(rank: int, tensors: Any, progress: Progress, gather: Gather, limit_s: float) -> Router:
    near = None
    if settings.flag("SAME_HOST", default=False):  # the program has chosen MPI: no other way unless it is asked for
        near = SameHostTransport.join(rank, lambda card: gather("same-host peers", card), limit_s)
    return Router(MpiTransport(tensors, progress), None, near)


def _is_done_in(request: Any, limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while not request.Test():
        if time.monotonic() > until:
            return False
        time.sleep(_PAUSE_S)  # MPI says only to who asks
    return True

"""Checks the communicator that a program gives: what it is, who is in it, and whether threads may use it."""

from __future__ import annotations

import sys
from typing import Any

from farspan.errors import PlanError, quoted
from farspan.launch.environment import read_environment

__all__ = ["check_communicator", "is_in_mpi", "same_ranks"]

_TRY = "from mpi4py import MPI\nmodel = farspan.distribute(model, comm=MPI.COMM_WORLD)"
_LEVELS = ("single", "funneled", "serialized", "multiple")


def is_in_mpi() -> bool:
    """Returns whether the program has called MPI_Init, as far as mpi4py knows; does not import it."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


def check_communicator(comm: Any) -> Any:
    """Check what was given as `comm`.

    Returns:
        The module `mpi4py.MPI`, which the program has imported.

    Raises:
        PlanError: It is no communicator of the ranks that are to train, or MPI is not ready for threads.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Comm):
        raise PlanError(
            f"comm= takes a communicator of mpi4py, not {quoted(comm)}.",
            why="farspan trains over the ranks of that communicator, with its transport.",
            hint=_TRY,
        )
    if mpi.Is_finalized() or not mpi.Is_initialized():
        state = "has been finalized" if mpi.Is_finalized() else "is not initialized"
        raise PlanError(
            f"MPI {state}.",
            why="comm= needs MPI from farspan.distribute to the end of training.",
            hint="let mpi4py call MPI_Init and MPI_Finalize: it does at its import, and at the end of the process",
        )
    if comm == mpi.COMM_NULL:
        raise PlanError(
            "this process is in no communicator: comm= is COMM_NULL.",
            why="Split with color=UNDEFINED gives that to the ranks that it leaves out.",
            hint="if comm != MPI.COMM_NULL:\n    model = farspan.distribute(model, comm=comm)",
        )
    if comm.Is_inter():
        raise PlanError(
            "comm= is an intercommunicator.",
            why="it has two groups of ranks, which only speak with those of the other one.",
            hint="farspan.distribute(model, comm=comm.Merge())",
        )
    _check_started_by_mpi(mpi)
    level = mpi.Query_thread()
    if level != mpi.THREAD_MULTIPLE:
        named = {getattr(mpi, f"THREAD_{name.upper()}"): f"MPI_THREAD_{name.upper()}" for name in _LEVELS}
        raise PlanError(
            f"MPI was initialized with {named.get(level, level)}, and farspan needs MPI_THREAD_MULTIPLE.",
            why="transfers go on while the program computes: a thread of farspan's calls MPI too.",
            hint="mpi4py.rc.thread_level = 'multiple'      before from mpi4py import MPI (it is what mpi4py asks for\n"
            "MPI_Init_thread(..., MPI_THREAD_MULTIPLE, ...)      by itself), or where the program is started from C",
        )
    return mpi


def _check_started_by_mpi(mpi: Any) -> None:
    """Raise an error if another launcher has started several processes, each of which is an MPI job of its own."""
    environment = read_environment(needs_rendezvous=False)
    is_other = environment.launcher in ("run", "hosts", "torchrun", "plain") and environment.world_size > 1
    if is_other and mpi.COMM_WORLD.Get_size() == 1:
        name = "torchrun" if environment.launcher == "torchrun" else "another launcher"
        name = "farspan run" if environment.launcher in ("run", "hosts") else name
        raise PlanError(
            f"MPI knows of one process, but {name} has started {environment.world_size}.",
            why="each of them would train a model of its own: comm= takes the ranks of MPI's launcher.",
            hint=f"mpirun -n {environment.world_size} python train.py, or farspan.distribute(model) without comm=",
        )


def same_ranks(mpi: Any, first: Any, second: Any) -> bool:
    """Returns whether two communicators have the same ranks, in the same order."""
    return mpi.Comm.Compare(first, second) in (mpi.IDENT, mpi.CONGRUENT)

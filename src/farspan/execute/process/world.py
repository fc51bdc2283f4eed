"""Sets up this process among its peers, once: the side channel and the transports."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from farspan import settings
from farspan.comm.mpi.communicator import is_in_mpi
from farspan.comm.mpi.network import MpiNetwork
from farspan.comm.rendezvous.group import find_peers
from farspan.comm.rendezvous.network import Network, Reached, SocketNetwork
from farspan.comm.router import Router
from farspan.control.channel import SideChannel
from farspan.errors import PlanError
from farspan.execute.agreement.agreement import Agreement
from farspan.execute.copies.start import keep_copies
from farspan.execute.data_axis.num_groups import check_num_groups, check_same_groups
from farspan.execute.data_axis.recovery.start import keep_going
from farspan.execute.data_axis.reduction import Reduction
from farspan.execute.engine import Engine
from farspan.execute.process.console import keep_log_apart
from farspan.execute.process.output import keep_output_apart
from farspan.execute.process.program_end import watch_end
from farspan.execute.process.stacks import watch_signal
from farspan.execute.teams import device_at
from farspan.launch.environment import Environment, read_environment
from farspan.launch.files import install_late
from farspan.launch.rank.notes import note_joining
from farspan.outputs import write_line
from farspan.record.intercept import activate, install
from farspan.record.ops.explicit_placement import leave_places_to_the_recorder, understand_places
from farspan.record.recorder import Recorder

__all__ = [
    "begin_recording",
    "current_engine",
    "engine_of_this_thread",
    "forget_engine",
    "local_rank_to_be",
    "num_ranks_to_be",
    "rank_to_be",
    "use_engine",
]

_log = logging.getLogger(__name__)
_DEADLINE_S = 300.0
_NAMES = {"plain": "a launcher", "openmpi": "mpirun", "pmi": "mpirun", "slurm": "srun"} | {"torchrun": "torchrun"}
_OF_FARSPAN = ("run", "hosts", "program")
"""Launchers that look after the output of ranks; a script for several processes does that itself."""
_VISIBLE = """\
farspan: all ranks train one model. If the script asks for RANK, WORLD_SIZE or the like, to shard data, scale the
  learning rate or wrap the model for DDP, it still finds those of {launcher}: take that out, or start it by
  farspan run -n {n}, under which it finds one process.
"""
_thread = threading.local()


def engine_of_this_thread(
    seed: int | None, num_groups: int | Callable[[int], int] | None = None, comm: Any = None
) -> Engine:
    """Returns the engine of this thread, set up from the environment on first use; alone, it sees nothing yet
    (`begin_recording`).

    Args:
        seed: Of what the model draws.
        num_groups: Into how many groups the ranks are divided; None for as many as there are, or one. A function
            chooses on rank 0, by the number of ranks, if they are not divided yet.
        comm: The communicator of mpi4py whose ranks there are; None for those of the environment.

    Raises:
        PlanError: The ranks cannot be divided so, or are divided otherwise; or they are others than those of `comm`.
    """
    engine = current_engine()
    if engine is None:
        network = None if comm is None else MpiNetwork(comm)
        if not callable(num_groups):
            check_num_groups(num_groups, num_ranks_to_be() if network is None else network.world_size)
        engine = _thread.engine = _set_up(seed, num_groups or 1, network)
        _thread.network = network
        return engine
    if comm is not None:
        _check_same(comm, engine)
    if num_groups is not None and not callable(num_groups):
        check_same_groups(num_groups, engine)
    return engine


def _check_same(comm: Any, engine: Engine) -> None:
    """Raise an error if the ranks are not those of a communicator."""
    network: MpiNetwork | None = getattr(_thread, "network", None)
    if network is not None:
        network.check_same(comm)
    elif MpiNetwork(comm).world_size > 1:
        raise PlanError(
            "the ranks have been found without comm= before.",
            why=f"farspan.distribute or farspan.from_rank was called first, and has found {engine.num_ranks}.",
            hint="comm= in the first call of farspan.distribute, before farspan.from_rank",
        )


def current_engine() -> Engine | None:
    """Returns the engine of this thread, if there is one."""
    return getattr(_thread, "engine", None)


def num_ranks_to_be() -> int:
    """Returns how many ranks there are, or will be once the engine is set up."""
    return dist.get_world_size() if dist.is_initialized() else _environment().world_size


def rank_to_be() -> int:
    """Returns the number of this process, also before the engine is set up."""
    return dist.get_rank() if dist.is_initialized() else _environment().rank


def local_rank_to_be() -> int:
    """Returns the number of this process among those of its machine."""
    if dist.is_initialized():  # its group counts, and says nothing of machines
        return dist.get_node_local_rank(dist.get_rank())
    return _environment().local_rank


def _environment() -> Environment:
    """Returns the place of this process; in a program of MPI's it may do without a rendezvous."""
    return read_environment(needs_rendezvous=not is_in_mpi())


def use_engine(engine: Engine) -> None:
    """Make `engine` this thread's."""
    _thread.engine = engine


def forget_engine() -> None:
    _thread.engine = None


def begin_recording(engine: Engine) -> None:
    """See what the program of this thread does from here on."""
    leave_places_to_the_recorder()
    install()
    activate(engine.recorder)


def deadline_s() -> float:
    """Returns the longest wait for another rank, in seconds: FARSPAN_DEADLINE, else 300."""
    return settings.seconds("DEADLINE", default=_DEADLINE_S)


def _set_up(seed: int | None, num_groups: int | Callable[[int], int], network: Network | None) -> Engine:
    keep_log_apart()
    if (rank_to_be() if network is None else network.rank) == 0:
        for line in settings.unknown_names(os.environ):
            write_line(line)
    limit_s = deadline_s()
    recorder = Recorder()
    if network is None and (peers := find_peers(limit_s)) is not None:
        network = SocketNetwork(peers)
    if network is None or network.world_size == 1:
        engine = Engine(recorder, SideChannel.alone(), None, seed=seed, deadline_s=limit_s)
        understand_places(lambda place: device_at(engine.teams, place, engine.devices, engine.num_ranks))
        return engine
    install()
    side = network.join(limit_s)
    try:
        agreement = Agreement(side, limit_s)
        given = "auto" if callable(num_groups) else num_groups
        agreement.agree_on("data_parallel argument", f"data_parallel={given}")
        if callable(num_groups):
            chosen = str(num_groups(network.world_size)) if network.rank == 0 else ""
            num_groups = int(agreement.broadcast("the number of groups", chosen.encode(), 0))
        if num_groups == 1:
            engine, router = _engine_of(network, side, recorder, seed, limit_s)
            if settings.flag("KEEP_GOING", default=False) and network.launcher == "run":
                assert isinstance(network, SocketNetwork)
                keep_copies(engine, network.peers, network.address, limit_s)
        else:
            engine, router = _engine_in_group(network, agreement, num_groups, recorder, seed, limit_s)
        engine.compare_generators()
        if network.launcher not in _OF_FARSPAN:
            keep_output_apart(network.rank, lambda blob: agreement.gather("output", blob))  # before files are
        remove_files = _keep_files_apart(network, agreement)
    except Exception as error:
        side.fail(error)  # or the others would wait for this rank's part
        raise
    watch_end(engine, network, router, remove_files)
    watch_signal(lambda: engine.agreement_of_all.side)
    if network.rank == 0 and network.launcher not in _OF_FARSPAN:
        write_line(_VISIBLE.format(launcher=_NAMES[network.launcher], n=network.world_size).rstrip())
    activate(recorder)
    return engine


def _engine_of(
    reached: Reached, side: SideChannel, recorder: Recorder, seed: int | None, limit_s: float
) -> tuple[Engine, Router | None]:
    """Returns the engine of a rank, and what carries its tensors, if there are others."""
    router = None
    if reached.world_size > 1:
        router = reached.open_router(Agreement(side, limit_s).gather, limit_s)
        _log.info("rank %d sends to %s", reached.rank, router.describe(reached.rank, side.world_size))
        side.wake = router.resume
    return Engine(recorder, side, router, seed=seed, deadline_s=limit_s), router


def _engine_in_group(
    network: Network,
    agreement: Agreement,
    num_groups: int,
    recorder: Recorder,
    seed: int | None,
    limit_s: float,
) -> tuple[Engine, Router | None]:
    """Returns the same, of a rank that is in one of several groups."""
    channel, in_group = network.divide(num_groups, agreement.gather, limit_s)
    recorder.draws.group = channel.number
    engine, router = _engine_of(in_group, channel, recorder, seed, limit_s)
    owners = network.owners(channel, limit_s)
    engine.groups = reduction = Reduction(engine, channel, owners, agreement)
    engine.agreement_of_all = agreement
    keeps_going = settings.flag("KEEP_GOING", default=False) and network.launcher in ("run", "hosts")
    if keeps_going and isinstance(network, SocketNetwork):
        engine.agreement_of_all = keep_going(reduction, network.peers, network.address, limit_s)
    engine.console.is_mute = channel.number > 0
    return engine, router


def _keep_files_apart(network: Network, agreement: Agreement) -> Callable[[], None]:
    """Leaves the script's files to rank 0, and lets the launcher know that all have joined; returns what ends it."""
    if network.launcher == "program":
        return lambda: None  # a script for several processes
    if network.launcher in ("run", "hosts"):
        note_joining()
    return install_late(network.rank, lambda blob: agreement.gather("files", blob))

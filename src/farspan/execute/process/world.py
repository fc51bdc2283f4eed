"""Sets up this process among its peers, once: the side channel and the transports."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from farspan import settings
from farspan.comm.collectives import Collectives
from farspan.comm.gloo import GlooTransport
from farspan.comm.nccl import NcclTransport
from farspan.comm.rendezvous.data_groups import form_groups, peers_in_group
from farspan.comm.rendezvous.group import Peers, find_peers
from farspan.comm.rendezvous.join import Joined, join_side_channel
from farspan.comm.router import Router
from farspan.comm.same_host.copies import SameHostTransport
from farspan.control.channel import SideChannel
from farspan.execute.agreement.agreement import Agreement
from farspan.execute.data_axis.num_groups import check_num_groups, check_same_groups
from farspan.execute.data_axis.reduction import Reduction
from farspan.execute.engine import Engine
from farspan.execute.process.console import keep_log_apart
from farspan.execute.process.program_end import watch_end
from farspan.execute.process.stacks import watch_signal
from farspan.execute.teams import device_at
from farspan.launch.environment import read_environment
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
    "num_ranks_to_be",
    "rank_to_be",
    "use_engine",
]

_log = logging.getLogger(__name__)
_DEADLINE_S = 300.0
_NAMES = {"plain": "a launcher", "openmpi": "mpirun", "pmi": "mpirun", "slurm": "srun"} | {"torchrun": "torchrun"}
_VISIBLE = """\
farspan: all ranks train one model. If the script asks for RANK, WORLD_SIZE or the like, to shard data, scale the
  learning rate or wrap the model for DDP, it still finds those of {launcher}: take that out, or start it by
  farspan run -n {n}, under which it finds one process.
"""
_thread = threading.local()


def engine_of_this_thread(seed: int | None, num_groups: int | Callable[[int], int] | None = None) -> Engine:
    """Returns the engine of this thread, set up from the environment on first use; alone, it sees nothing yet
    (`begin_recording`).

    Args:
        seed: Of what the model draws.
        num_groups: Into how many groups the ranks are divided; None for as many as there are, or one. A function
            chooses on rank 0, by the number of ranks, if they are not divided yet.

    Raises:
        PlanError: The ranks cannot be divided so, or are divided otherwise.
    """
    engine = current_engine()
    if engine is None:
        if not callable(num_groups):
            check_num_groups(num_groups, num_ranks_to_be())
        engine = _thread.engine = _set_up(seed, num_groups or 1)
    elif num_groups is not None and not callable(num_groups):
        check_same_groups(num_groups, engine)
    return engine


def current_engine() -> Engine | None:
    """Returns the engine of this thread, if there is one."""
    return getattr(_thread, "engine", None)


def num_ranks_to_be() -> int:
    """Returns how many ranks there are, or will be once the engine is set up."""
    return dist.get_world_size() if dist.is_initialized() else read_environment().world_size


def rank_to_be() -> int:
    """Returns the number of this process, also before the engine is set up."""
    return dist.get_rank() if dist.is_initialized() else read_environment().rank


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


def _set_up(seed: int | None, num_groups: int | Callable[[int], int]) -> Engine:
    keep_log_apart()
    if rank_to_be() == 0:
        for line in settings.unknown_names(os.environ):
            write_line(line)
    limit_s = deadline_s()
    recorder = Recorder()
    peers = find_peers(limit_s)
    if peers is None:
        engine = Engine(recorder, SideChannel.alone(), None, seed=seed, deadline_s=limit_s)
        understand_places(lambda place: device_at(engine.teams, place, engine.num_ranks))
        return engine
    install()
    joined = join_side_channel(peers, limit_s)
    try:
        agreement = Agreement(joined.side, limit_s)
        given = "auto" if callable(num_groups) else num_groups
        agreement.agree_on("data_parallel argument", f"data_parallel={given}")
        if callable(num_groups):
            chosen = str(num_groups(peers.world_size)) if peers.rank == 0 else ""
            num_groups = int(agreement.broadcast("the number of groups", chosen.encode(), 0))
        if num_groups == 1:
            engine, router = _engine_of(peers, joined, recorder, seed, limit_s)
        else:
            engine, router = _engine_in_group(peers, joined, agreement, num_groups, recorder, seed, limit_s)
        engine.compare_generators()
        remove_files = _keep_files_apart(peers, agreement)
    except Exception as error:
        joined.side.fail(error)  # or the others would wait for this rank's part
        raise
    watch_end(engine, peers.rank, router, remove_files)
    watch_signal(joined.side)
    if peers.rank == 0 and peers.launcher not in ("run", "hosts", "program"):
        write_line(_VISIBLE.format(launcher=_NAMES[peers.launcher], n=peers.world_size).rstrip())
    activate(recorder)
    return engine


def _engine_of(
    peers: Peers, joined: Joined, recorder: Recorder, seed: int | None, limit_s: float
) -> tuple[Engine, Router | None]:
    """Returns the engine of a rank among `peers`, and what carries its tensors, if there are others."""
    router = _open_router(peers, joined, limit_s) if peers.world_size > 1 else None
    if router is not None:
        joined.side.wake = router.resume
    return Engine(recorder, joined.side, router, seed=seed, deadline_s=limit_s), router


def _engine_in_group(
    peers: Peers,
    joined: Joined,
    agreement: Agreement,
    num_groups: int,
    recorder: Recorder,
    seed: int | None,
    limit_s: float,
) -> tuple[Engine, Router | None]:
    """Returns the same, of a rank that is in one of several groups."""
    channel = form_groups(joined, num_groups, agreement.gather, limit_s)
    in_group = peers_in_group(peers, channel.number, num_groups)
    store = dist.PrefixStore(f"position {channel.rank}", peers.store)
    recorder.draws.group = channel.number
    engine, router = _engine_of(in_group, Joined(side=channel, address=joined.address), recorder, seed, limit_s)
    owners = Collectives(store, channel.number, num_groups, joined.address, limit_s)
    engine.groups, engine.agreement_of_all = Reduction(engine, channel, owners, agreement), agreement
    engine.console.is_mute = channel.number > 0
    return engine, router


def _keep_files_apart(peers: Peers, agreement: Agreement) -> Callable[[], None]:
    """Leaves the script's files to rank 0, and lets the launcher know that all have joined; returns what ends it."""
    if peers.launcher == "program":
        return lambda: None  # a script for several processes
    if peers.launcher in ("run", "hosts"):
        note_joining()
    return install_late(peers.rank, lambda blob: agreement.gather("files", blob))


def _open_router(peers: Peers, joined: Joined, limit_s: float) -> Router:
    rank, store, side = peers.rank, peers.store, joined.side
    device = None
    if torch.cuda.is_available() and dist.is_nccl_available():
        device = NcclTransport(dist.PrefixStore("nccl", store), rank)
    near = None
    # All ranks have the variable or none; a rank that had it alone would wait for the others' half of the introduction.
    if settings.flag("SAME_HOST", default=True):
        agreement = Agreement(side, limit_s)
        near = SameHostTransport.join(rank, lambda card: agreement.gather("same-host peers", card), limit_s)
    host = GlooTransport(dist.PrefixStore("gloo", store), rank, peers.world_size, joined.address, limit_s)
    router = Router(host, device, near)
    _log.info("rank %d sends to %s", rank, router.describe(rank, side.world_size))
    return router

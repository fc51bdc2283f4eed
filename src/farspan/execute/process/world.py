"""This process among its peers: the side channel and the transports, set up once."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from farspan import settings
from farspan.comm.gloo import GlooTransport
from farspan.comm.nccl import NcclTransport
from farspan.comm.rendezvous.group import Peers, find_peers
from farspan.comm.rendezvous.join import Joined, join_side_channel
from farspan.comm.router import Router
from farspan.comm.same_host.copies import SameHostTransport
from farspan.control.channel import SideChannel
from farspan.execute.agreement.agreement import Agreement
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


def engine_of_this_thread(seed: int | None) -> Engine:
    """The engine of this thread, set up from the environment on first use; alone, it sees nothing yet
    (`begin_recording`).
    """
    engine = current_engine()
    if engine is None:
        engine = _thread.engine = _set_up(seed)
    return engine


def current_engine() -> Engine | None:
    """The engine of this thread, if there is one."""
    return getattr(_thread, "engine", None)


def num_ranks_to_be() -> int:
    """How many ranks there are, or will be once the engine is set up."""
    return dist.get_world_size() if dist.is_initialized() else read_environment().world_size


def rank_to_be() -> int:
    """The number of this process, also before the engine is set up."""
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
    """The longest wait for another rank, in seconds: FARSPAN_DEADLINE, else 300."""
    return settings.seconds("DEADLINE", default=_DEADLINE_S)


def _set_up(seed: int | None) -> Engine:
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
    else:
        install()
        joined = join_side_channel(peers, limit_s)
        try:
            router = _open_router(peers, joined, limit_s)
            joined.side.wake = router.resume
            engine = Engine(recorder, joined.side, router, seed=seed, deadline_s=limit_s)
            engine.compare_generators()
            remove_files = _keep_files_apart(peers, joined.side, limit_s)
        except Exception as error:
            joined.side.fail(error)  # or the others would wait for this rank's part
            raise
        watch_end(engine, router, remove_files)
        watch_signal(joined.side)
        if peers.rank == 0 and peers.launcher not in ("run", "program"):
            write_line(_VISIBLE.format(launcher=_NAMES[peers.launcher], n=peers.world_size).rstrip())
        activate(recorder)
    return engine


def _keep_files_apart(peers: Peers, side: SideChannel, limit_s: float) -> Callable[[], None]:
    """Leave the script's files to rank 0, and tell the launcher that the ranks have met; returns what ends it."""
    if peers.launcher == "program":
        return lambda: None  # a script for several processes
    if peers.launcher == "run":
        note_joining()
    agreement = Agreement(side, limit_s)
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

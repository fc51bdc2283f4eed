"""This process among its peers: the side channel, the media; set up once, torn down at exit."""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable
from types import TracebackType

import torch
import torch.distributed as dist

from farspan.errors import DivergenceError, FarspanError, LaunchError, PlanError, RemoteError
from farspan.launch.environment import read_environment
from farspan.launch.files import install_late
from farspan.launch.rank.trained import note_joining
from farspan.lazy import Recorder, activate, install
from farspan.runtime.abort.aborted import rank_that_raised
from farspan.runtime.agreement import Agreement
from farspan.runtime.console import keep_log_apart
from farspan.runtime.engine import Engine
from farspan.runtime.failures import first_line
from farspan.runtime.media import GlooMedium, NcclMedium, Roads, SameHostMedium
from farspan.runtime.side import SideChannel
from farspan.runtime.side.peers import Peers, find_peers

__all__ = ["current_engine", "engine_of_this_thread", "forget_engine", "num_ranks_to_be", "rank_to_be"]

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
    """The engine of this thread, set up from the environment on first use."""
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


def deadline_s() -> float:
    """The longest wait for another rank, in seconds: FARSPAN_DEADLINE, else 300."""
    text = os.environ.get("FARSPAN_DEADLINE", "")
    try:
        return float(text) if text else _DEADLINE_S
    except ValueError:
        raise LaunchError(
            f"FARSPAN_DEADLINE={text!r} is not a number of seconds.", hint="FARSPAN_DEADLINE=600"
        ) from None


def _set_up(seed: int | None) -> Engine:
    keep_log_apart()
    limit_s = deadline_s()
    install()
    recorder = Recorder()
    peers = find_peers(limit_s)
    if peers is None:
        engine = Engine(recorder, SideChannel.alone(), None, seed=seed, deadline_s=limit_s)
    else:
        side = _join_side_channel(peers, limit_s)
        roads = _open_roads(peers, side, limit_s)
        engine = Engine(recorder, side, roads, seed=seed, deadline_s=limit_s)
        engine.compare_generators()
        _watch_exit(engine, roads, _keep_files_apart(peers, side, limit_s))
        if peers.rank == 0 and peers.launcher not in ("run", "program"):
            sys.stderr.write(_VISIBLE.format(launcher=_NAMES[peers.launcher], n=peers.world_size))
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


def _open_roads(peers: Peers, side: SideChannel, limit_s: float) -> Roads:
    rank, store = peers.rank, peers.store
    device = None
    if torch.cuda.is_available() and dist.is_nccl_available():
        device = NcclMedium(dist.PrefixStore("nccl", store), rank, limit_s)
    near = None
    # All ranks have the variable or none; a rank that had it alone would wait for the others' half of the introduction.
    if os.environ.get("FARSPAN_SAME_HOST", "1") != "0":
        agreement = Agreement(side, limit_s)
        near = SameHostMedium.join(rank, lambda card: agreement.gather("neighbours", card), limit_s)
    host = GlooMedium(dist.PrefixStore("gloo", store), rank, peers.world_size, peers.address, limit_s)
    roads = Roads(host, device, near)
    _log.info("rank %d sends to %s", rank, roads.describe(rank, side.world_size))
    return roads


def _join_side_channel(peers: Peers, limit_s: float) -> SideChannel:
    """Rank 0 hosts the hub and tells its address through the store.

    With it goes the secret of the run, unless FARSPAN_SECRET says it: whoever can read the store could take part.
    """
    server, known = None, os.environ.get("FARSPAN_SECRET", "")
    if peers.rank == 0:
        secret = known or secrets.token_hex(32)
        server = SideChannel.host(peers.world_size, secret, peers.address)
        peers.store.set("hub", json.dumps([peers.address, server.address[1], "" if known else secret]))
    host, port, given = json.loads(peers.store.get("hub"))
    if bool(given) == bool(known):
        raise LaunchError(
            "the ranks do not agree on the secret of this run.",
            why=f"FARSPAN_SECRET is set on {'this rank' if known else 'rank 0'} and not on the other.",
            hint="the same FARSPAN_SECRET on every rank, or on none",
        )
    return SideChannel.connect(peers.rank, peers.world_size, (host, port), known or given, limit_s, server=server)


_exit_codes: list[int] = []


def _fail_at_exit() -> None:
    """The program has ended well by itself, and yet the process must not: the ranks did not do the same."""
    _exit_codes.append(1)


def _exit_as_failed() -> None:
    """Runs after all that the program wants done at its end, for it was registered before."""
    if _exit_codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_codes[0])


atexit.register(_exit_as_failed)


def _watch_exit(engine: Engine, roads: Roads, remove_files: Callable[[], None]) -> None:
    """A program that ends says so; one that fails says why; the hub outlives the other ranks."""
    previous = sys.excepthook
    side = engine.side
    has_raised = False

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal has_raised
        has_raised = True
        if isinstance(error, RemoteError):
            sys.stderr.write(f"{type(error).__name__}: {error}\n")  # the failing rank shows its own traceback
            return
        raised_by = rank_that_raised(error)
        if raised_by is not None:  # and it tells why all end
            line = f"rank {raised_by} failed: {type(error).__name__}: {first_line(error)}"
            sys.stderr.write(f"{RemoteError.__name__}: {line}\n")
            return
        previous(kind, error, trace)
        if isinstance(error, (PlanError, DivergenceError)):
            return  # every rank finds it by itself, and says it in full
        side.fail(error)

    def leave() -> None:
        try:
            if not has_raised and engine.is_healthy:
                engine.finish()
        except FarspanError as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            _fail_at_exit()
        roads.close()
        remove_files()
        engine.values.close()
        side.close(linger_s=10.0)

    sys.excepthook = tell
    atexit.register(leave)

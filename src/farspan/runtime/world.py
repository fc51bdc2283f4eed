"""This process among its peers: torch.distributed, the side channel, the medium; set up once, torn down at exit."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
import threading
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from farspan.errors import DivergenceError, FarspanError, LaunchError, PlanError, RemoteError
from farspan.launch.environment import Environment, read_environment
from farspan.lazy import Recorder, activate, install
from farspan.lazy.torch_private import store_of_default_group
from farspan.runtime.agreement import Agreement
from farspan.runtime.engine import Engine
from farspan.runtime.media import GlooMedium, NcclMedium, Roads, SameHostMedium
from farspan.runtime.side import SideChannel

__all__ = ["current_engine", "engine_of_this_thread", "forget_engine", "num_ranks_to_be"]

_log = logging.getLogger(__name__)
_DEADLINE_S = 300.0
_thread = threading.local()


def engine_of_this_thread(seed: int) -> Engine:
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


def _set_up(seed: int) -> Engine:
    limit_s = deadline_s()
    install()
    recorder = Recorder()
    if not dist.is_initialized() and read_environment().world_size == 1:
        engine = Engine(recorder, SideChannel.alone(), None, seed=seed, deadline_s=limit_s)
    else:
        if not dist.is_initialized():  # else what the program has set up counts, not what launch variables say
            _join_group(read_environment(), limit_s)
        side = _join_side_channel(limit_s)
        medium = _open_roads(side, limit_s) if dist.get_world_size() > 1 else None
        engine = Engine(recorder, side, medium, seed=seed, deadline_s=limit_s)
        engine.compare_generators()
        _watch_exit(engine)
    activate(recorder)
    return engine


def _join_group(environment: Environment, limit_s: float) -> None:
    os.environ.setdefault("RANK", str(environment.rank))
    os.environ.setdefault("WORLD_SIZE", str(environment.world_size))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(
            backend, rank=environment.rank, world_size=environment.world_size, timeout=timedelta(seconds=limit_s)
        )
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {environment.rank} of {environment.world_size} could not join the others.",
            why=str(error).splitlines()[0],
            hint="start all ranks with the same MASTER_ADDR and MASTER_PORT, for example: farspan run -n 2 train.py",
        ) from error


def _open_roads(side: SideChannel, limit_s: float) -> Roads:
    rank = side.rank
    device = NcclMedium(rank, limit_s) if torch.cuda.is_available() and dist.is_nccl_available() else None
    near = None
    # All ranks have the variable or none; a rank that had it alone would wait for the others' half of the introduction.
    if os.environ.get("FARSPAN_SAME_HOST", "1") != "0":
        agreement = Agreement(side, limit_s)
        near = SameHostMedium.join(rank, lambda card: agreement.gather("neighbours", card), limit_s)
    roads = Roads(GlooMedium(rank, side.world_size, limit_s), device, near)
    _log.info("rank %d sends to %s", rank, roads.describe(rank, side.world_size))
    return roads


def _join_side_channel(limit_s: float) -> SideChannel:
    """Rank 0 hosts the hub and tells its address through the group's store."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return SideChannel.alone()
    store = dist.PrefixStore("farspan", store_of_default_group())
    server = None
    if rank == 0:
        token = secrets.token_hex(16)
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        server = SideChannel.host(
            world_size, token, "0.0.0.0" if host not in ("127.0.0.1", "localhost") else "127.0.0.1"
        )
        store.set("hub", f"{host} {server.address[1]} {token}")
    host, port, token = store.get("hub").decode().split()
    return SideChannel.connect(rank, world_size, (host, int(port)), token, limit_s, server=server)


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


def _watch_exit(engine: Engine) -> None:
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
        side.close(linger_s=10.0)

    sys.excepthook = tell
    atexit.register(leave)

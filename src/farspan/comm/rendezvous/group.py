"""Finds out which process of how many this is, and opens a store of farspan's own that all of them can reach.

Nothing here touches `torch.distributed`'s default group: `is_initialized()` stays what the script made it.

    the script has a default group    its store, under a prefix; rank and size are the group's
    torchrun                          the agent's store at MASTER_ADDR:MASTER_PORT, under a prefix for each restart
    srun, mpirun, ...                 a store of ours, which rank 0 hosts at that address
    farspan run                       a file in a folder of this user's alone: all ranks are on one machine
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from farspan.comm.rendezvous.addresses import LOOPBACK
from farspan.errors import LaunchError
from farspan.launch.environment import Environment, hosts_store, read_environment
from farspan.torch_private.groups import FileStore, PrefixStore, TCPStore, store_of_default_group

__all__ = ["Peers", "find_peers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """This rank's place among the others, and the store they share.

    Attributes:
        rank: Of this process.
        world_size: Number of processes.
        store: What all of them can write to and read from; keys are farspan's own.
        host: Where rank 0 is said to be.
        launcher: What started them, as in `Environment`; "program" if the script itself has set up a group.
    """

    rank: int
    world_size: int
    store: Any
    host: str
    launcher: str


def find_peers(limit_s: float) -> Peers | None:
    """Find the other processes of this job; None if there are none.

    Args:
        limit_s: How long the store may take to answer.

    Raises:
        LaunchError: The store cannot be reached.
    """
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1:
            return None
        store = PrefixStore("farspan", store_of_default_group())
        host = os.environ.get("MASTER_ADDR", LOOPBACK)
        return Peers(rank=rank, world_size=world_size, store=store, host=host, launcher="program")
    environment = read_environment()
    rank, world_size = environment.rank, environment.world_size
    if world_size == 1:
        return None
    try:
        store = _open_store(environment, limit_s)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {rank} of {world_size} could not join the others.",
            why=str(error).splitlines()[0],
            hint="start all ranks with the same MASTER_ADDR and MASTER_PORT, or by farspan run -n 2 train.py",
        ) from error
    host = environment.master_addr or LOOPBACK
    return Peers(rank=rank, world_size=world_size, store=store, host=host, launcher=environment.launcher)


def _open_store(environment: Environment, limit_s: float) -> Any:
    if environment.store is not None:
        store = FileStore(environment.store, environment.world_size)
        store.set_timeout(timedelta(seconds=limit_s))
        return PrefixStore("farspan", store)
    assert environment.master_addr is not None and environment.master_port is not None
    store = TCPStore(
        environment.master_addr,
        environment.master_port,
        environment.world_size,
        is_master=hosts_store(environment),
        timeout=timedelta(seconds=limit_s),
        wait_for_workers=False,  # torch would say how many have come, not who is missing
        multi_tenant=True,  # the script may set up a group at the same address later
    )
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"farspan/{restart}", store)

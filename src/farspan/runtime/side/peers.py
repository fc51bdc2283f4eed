"""The processes of this job as they find each other: a store of farspan's own, and who is which rank.

Nothing here touches `torch.distributed`'s default group: `is_initialized()` stays what the script made it.

    the script has a default group    its store, under a prefix; rank and size are the group's
    torchrun                          the agent's store at MASTER_ADDR:MASTER_PORT, under a prefix for each restart
    srun, mpirun, ...                 a store of ours, which rank 0 hosts at that address
    farspan run                       a file in a folder of this user's alone: all ranks are on one machine
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from farspan.errors import LaunchError
from farspan.launch.environment import Environment, read_environment
from farspan.lazy.torch_private.groups import FileStore, PrefixStore, TCPStore, store_of_default_group

__all__ = ["Peers", "find_peers"]

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """This rank among the others.

    Attributes:
        rank: Of this process.
        world_size: Number of processes.
        store: What all of them can write to and read from; keys are farspan's own.
        address: An address of this host at which all other ranks reach it.
        launcher: What started them, as in `Environment`; "program" if the script itself has set up a group.
    """

    rank: int
    world_size: int
    store: Any
    address: str
    launcher: str


def find_peers(limit_s: float) -> Peers | None:
    """Find the other processes of this job; None if there are none.

    Raises:
        LaunchError: They cannot be found.
    """
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1:
            return None
        store = PrefixStore("farspan", store_of_default_group())
        host, launcher = os.environ.get("MASTER_ADDR", _LOOPBACK), "program"
    else:
        environment = read_environment()
        rank, world_size = environment.rank, environment.world_size
        if world_size == 1:
            return None
        host, launcher = environment.master_addr or _LOOPBACK, environment.launcher
        try:
            store = _open_store(environment, limit_s)
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"rank {rank} of {world_size} could not join the others.",
                why=str(error).splitlines()[0],
                hint="start all ranks with the same MASTER_ADDR and MASTER_PORT, or by farspan run -n 2 train.py",
            ) from error
    address = _agree_on_address(store, rank, world_size, host)
    return Peers(rank=rank, world_size=world_size, store=store, address=address, launcher=launcher)


def _open_store(environment: Environment, limit_s: float) -> Any:
    if environment.store is not None:
        store = FileStore(environment.store, environment.world_size)
        store.set_timeout(timedelta(seconds=limit_s))
        return PrefixStore("farspan", store)
    is_agents = environment.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    assert environment.master_addr is not None and environment.master_port is not None
    store = TCPStore(
        environment.master_addr,
        environment.master_port,
        environment.world_size,
        is_master=environment.rank == 0 and not is_agents,
        timeout=timedelta(seconds=limit_s),
        multi_tenant=True,  # the script may set up a group at the same address later
    )
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"farspan/{restart}", store)


def _agree_on_address(store: Any, rank: int, world_size: int, master_addr: str) -> str:
    """The address of this host that leads to rank 0's.

    On rank 0's own host that may be a loopback address: where ranks of other hosts take part, it is the one that leads
    to the first of these instead.
    """
    own = _address_towards(master_addr)
    store.set(f"address {rank}", own)
    if not _is_loopback(own):
        return own
    others = [store.get(f"address {other}").decode() for other in range(world_size) if other != rank]
    distant = next((other for other in others if not _is_loopback(other)), None)
    return own if distant is None else _address_towards(distant)


def _address_towards(host: str) -> str:
    """Which of this host's addresses the system would send from to reach `host`; sends nothing."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"this host has no way to {host}.",
            why=f"{error.strerror or error}; {host} is where rank 0 is said to be.",
            hint="MASTER_ADDR=<an address of rank 0's host that all others reach>",
        ) from None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback

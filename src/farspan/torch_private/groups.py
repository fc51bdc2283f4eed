"""Process groups that are in none of torch.distributed's lists, made by private torch names."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch._C._distributed_c10d import FileStore as FileStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.distributed.distributed_c10d import _get_default_store

__all__ = ["FileStore", "PrefixStore", "TCPStore", "gloo_group", "nccl_group", "store_of_default_group"]


def store_of_default_group() -> Any:
    """Returns the store of the group that the program has set up."""
    return _get_default_store()


def gloo_group(store: Any, rank: int, size: int, *, address: str, interfaces: Sequence[str], timeout: timedelta) -> Any:
    """Returns a gloo group bound to `interfaces`, or else to `address`."""
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._timeout = timeout
    named = [kind.create_device(interface=name) for name in interfaces]
    options._devices = named or [kind.create_device(hostname=address)]
    return kind(store, rank, size, options)


def nccl_group(store: Any, rank: int, size: int, *, timeout: timedelta) -> Any:
    """Returns an NCCL group."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)

"""Servers that have imported torch: each forks processes on demand, which start in a tenth of a second.

A worker of pytest-xdist uses those of the process that started it: imported once, not once in each worker.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import multiprocessing.forkserver as forkserver
import os
import threading
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from typing import Any

__all__ = ["NUM_SERVERS", "open_to_others", "preload", "start", "use", "wait_for_servers"]

NUM_SERVERS = 3
_PRELOADED = ["farspan.api", "torch._dynamo", "torch.distributed.fsdp", "tests.support.warm.frozen"]
_ADDRESS = ("_forkserver_address", "_forkserver_authkey")  # the second is of newer Pythons
_context = multiprocessing.get_context("forkserver")
_starting = threading.Lock()
"""Held by whoever has exchanged multiprocessing's only server for another one, or the environment."""
_given: list[Mapping[str, Any]] = []
"""What `open_to_others` has returned in another process."""


class _Others(forkserver.ForkServer):
    """A server that another process has started, and ends when that one ends."""

    def __init__(self, address: Mapping[str, Any]) -> None:
        super().__init__()
        vars(self).update(address)
        self._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)

    def ensure_running(self) -> None:
        pass


def open_to_others() -> list[dict[str, Any]]:
    """Starts all servers; returns what another process needs to use them."""
    servers = [vars(_server_of(number)) for number in range(NUM_SERVERS)]
    return [{name: server[name] for name in _ADDRESS if name in server} for server in servers]


def use(given: list[Mapping[str, Any]]) -> None:
    """Lets this process use the servers of another one."""
    _given[:] = given


def preload() -> None:
    """Imports here what the servers import."""
    for name in _PRELOADED:
        importlib.import_module(name)


def start(server: int, target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Calls `target` in a process of a server's."""
    process = _context.Process(target=target, args=arguments)
    with _starting:
        usual = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = _server_of(server).connect_to_new_process
        try:
            process.start()
        finally:
            forkserver.connect_to_new_process = usual
    return process


@functools.cache
def wait_for_servers(number: int) -> None:
    """Until so many servers have imported all: no rank's time runs while the server of another one still does."""
    for process in [start(server, _nothing) for server in range(number)]:
        process.join()


def _nothing() -> None:
    pass


@functools.cache
def _server_of(number: int) -> forkserver.ForkServer:
    """A server whose children have a hash seed that no other server's children have."""
    if _given:
        return _Others(_given[number])
    server = forkserver.ForkServer()
    server.set_forkserver_preload(_PRELOADED)
    kept = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = str(number + 1)
    try:
        server.ensure_running()
    finally:
        del os.environ["PYTHONHASHSEED"]
        if kept is not None:
            os.environ["PYTHONHASHSEED"] = kept
    return server

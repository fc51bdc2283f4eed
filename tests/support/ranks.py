"""Several ranks: as threads of this process over an in-memory medium, or as real processes over gloo."""

from __future__ import annotations

import functools
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farspan.errors import RemoteError
from farspan.lazy import Recorder, activate, install
from farspan.runtime.engine import Engine
from farspan.runtime.media.local import LocalMedium, LocalNetwork
from farspan.runtime.side import SideChannel
from farspan.runtime.world import use_engine

__all__ = ["Finished", "differences", "free_port", "run_processes", "run_threads"]

SOURCES = str(Path(__file__).resolve().parents[2] / "src")
ROOT = str(Path(__file__).resolve().parents[2])


def run_threads(
    num_ranks: int,
    program: Callable[[int], Any],
    *,
    deadline_s: float = 100.0,
    lookahead: int = 2,
    medium: Any = None,
) -> list[Any]:
    """Run `program(rank)` on `num_ranks` threads that are each a rank; return what they returned, by rank.

    The first exception of a rank is raised; what another rank's exception caused comes last.
    """
    install()
    network = LocalNetwork()
    token = secrets.token_hex(8)
    server = SideChannel.host(num_ranks, token, "127.0.0.1") if num_ranks > 1 else None
    results: list[Any] = [None] * num_ranks
    errors: list[tuple[float, int, BaseException]] = []

    def run(rank: int) -> None:
        side = (
            SideChannel.alone()
            if server is None
            else SideChannel.connect(
                rank, num_ranks, server.address, token, deadline_s, server=server if rank == 0 else None
            )
        )
        recorder = Recorder()
        road = (medium or LocalMedium)(rank, network)
        engine = Engine(recorder, side, road, seed=0, deadline_s=deadline_s)
        engine.lookahead = lookahead
        use_engine(engine)
        activate(recorder)
        try:
            results[rank] = program(rank)
            if num_ranks > 1:
                side.finish(deadline_s)
        except BaseException as error:
            errors.append((time.monotonic(), rank, error))
            if engine.is_healthy:
                side.fail(error)
        finally:
            side.close(linger_s=5.0)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s * 2)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise min(errors, key=lambda item: (isinstance(item[2], RemoteError), item[0]))[2]
    return results


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One process that has ended."""

    code: int
    stdout: str
    stderr: str
    duration_s: float


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_processes(
    num_ranks: int,
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    timeout_s: float = 90.0,
    environment: dict[str, str] | None = None,
    started: Callable[[list[subprocess.Popen[str]]], None] | None = None,
) -> list[Finished]:
    """Run a script on `num_ranks` processes with the usual rank variables; return how each ended, by rank.

    Args:
        started: Called with the processes once they run; may kill some.
    """
    port = free_port()
    processes: list[subprocess.Popen[str]] = []
    began = time.monotonic()
    for rank in range(num_ranks):
        variables = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([SOURCES, ROOT]),
            **(environment or {}),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    finished: list[Finished | None] = [None] * num_ranks

    def collect(rank: int) -> None:
        process = processes[rank]
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += f"\n[test: killed after {timeout_s} s]"
        finished[rank] = Finished(code=process.returncode, stdout=out, stderr=err, duration_s=time.monotonic() - began)

    collectors = [threading.Thread(target=collect, args=(rank,)) for rank in range(num_ranks)]
    for collector in collectors:
        collector.start()
    if started is not None:
        started(processes)
    for collector in collectors:
        collector.join()
    return [item for item in finished if item is not None]


@functools.cache
def differences(script: str, group: str, num_processes: int) -> list[dict[str, str]]:
    """What each rank finds different from the plain program, by name: the last line that `script group` prints."""
    finished = run_processes(num_processes, script, [group], timeout_s=240.0)
    assert [process.stderr for process in finished if process.code] == []
    return [json.loads(process.stdout.splitlines()[-1]) for process in finished]

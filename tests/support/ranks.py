"""Several ranks: as threads of this process over an in-memory transport, or as real processes over gloo.

Processes are children of servers that have imported torch already: each starts in a tenth of a second, and has its own
memory, signals, exit code and output as any other. Each rank has a server of its own, with a hash seed of its own: sets
of strings have another order on every rank, as they have in real programs. Threads share one hash seed, and the random
generators of their process, so what rests on either is only seen by processes. Real commands: tests/launch.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import runpy
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from tests.comm.local import LocalNetwork, LocalTransport
from tests.hangs.hangs import PATIENCE_S, show_stacks, show_stacks_at_end, stacks_of
from tests.support.side import connect, open_hubs
from tests.support.warm.servers import NUM_SERVERS, start, wait_for_servers

from farspan.control.channel import SideChannel
from farspan.errors import RemoteError
from farspan.execute.engine import Engine
from farspan.execute.process.world import use_engine
from farspan.record.intercept import activate, install
from farspan.record.recorder import Recorder

__all__ = [
    "SOURCES",
    "Finished",
    "differences",
    "differing",
    "ended",
    "free_port",
    "outputs",
    "run_processes",
    "run_threads",
]

SOURCES = str(Path(__file__).resolve().parents[2] / "src")
ROOT = str(Path(__file__).resolve().parents[2])


def run_threads(
    num_ranks: int,
    program: Callable[[int], Any],
    *,
    deadline_s: float = 100.0,
    lookahead: int = 2,
    transport: Any = None,
    patience_s: float = 100.0,
) -> list[Any]:
    """Run `program(rank)` on `num_ranks` threads that are each a rank; return what they returned, by rank.

    The first exception of a rank is raised; what another rank's exception caused comes last. A rank that has not ended
    `patience_s` after its deadline hangs: the error shows where all ranks are.
    """
    install()
    network = LocalNetwork()
    token = secrets.token_hex(8)
    servers = open_hubs(num_ranks, token) if num_ranks > 1 else {}
    results: list[Any] = [None] * num_ranks
    errors: list[tuple[float, int, BaseException]] = []
    state = torch.get_rng_state()

    def run(rank: int) -> None:
        side = connect(servers, rank, num_ranks, token, deadline_s) if servers else SideChannel.alone()
        recorder = Recorder()
        if num_ranks > 1:  # they share one process, and each program has its own random numbers
            recorder.draws.generator = torch.Generator()
            recorder.draws.generator.set_state(state)
        made = (transport or LocalTransport)(rank, network)
        engine = Engine(recorder, side, made, seed=0, deadline_s=deadline_s)
        engine.lookahead = lookahead
        use_engine(engine)
        activate(recorder)
        try:
            results[rank] = program(rank)
            if num_ranks > 1:
                engine.finish()
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
        thread.join(deadline_s + patience_s)  # on a loaded machine an error may take much longer than its deadline
        if thread.is_alive():
            raise AssertionError(f"a rank hangs\n{stacks_of({f'rank {n}': one for n, one in enumerate(threads)})}")
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
    """One below those that systems give to whoever asks for any: no connection takes it before it is used."""
    while True:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", 10_000 + secrets.randbelow(20_000)))
            return int(listener.getsockname()[1])


def run_processes(
    num_ranks: int,
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    timeout_s: float = 200.0,
    environment: dict[str, str] | None = None,
    stops: int | None = None,
) -> list[Finished]:
    """Run a script on `num_ranks` processes with the usual rank variables; return how each ended, by rank.

    If a rank has not ended in time, the error shows the stacks of all ranks that were running.

    Args:
        num_ranks: How many.
        script: What each runs.
        arguments: Of the script.
        timeout_s: When all processes are ended.
        environment: More variables.
        stops: A rank that stops itself (SIGSTOP): it is ended once the others have ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _run_processes(num_ranks, script, arguments, timeout_s, environment or {}, stops, Path(folder))


def _run_processes(
    num_ranks: int,
    script: str | Path,
    arguments: Sequence[str],
    timeout_s: float,
    environment: dict[str, str],
    stops: int | None,
    folder: Path,
) -> list[Finished]:
    wait_for_servers(min(num_ranks, NUM_SERVERS))
    port = free_port()
    processes: list[ForkServerProcess] = []
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
            "FARSPAN_FILES": "all",  # each tells what it found in a file of its own
            "PYTHONPATH": os.pathsep.join([SOURCES, ROOT]),
            **environment,
        }
        out, err = outputs(folder, rank)
        words = [str(script), *arguments]
        processes.append(start(rank % NUM_SERVERS, _main, words, variables, str(out), str(err)))
    finished: list[Finished | None] = [None] * num_ranks
    late: list[int] = []
    telling = threading.Lock()

    def collect(rank: int) -> None:
        process = processes[rank]
        if rank == stops:
            for other in collectors[:rank] + collectors[rank + 1 :]:
                other.join()
            process.kill()
        process.join(timeout_s)
        if process.exitcode is None:
            with telling:
                if not late:
                    show_stacks(one.pid for one in processes if one.pid is not None)
                late.append(rank)
            process.join(PATIENCE_S)
            process.kill()
            process.join()
        duration_s = time.monotonic() - began
        out, err = (path.read_text(errors="replace") if path.exists() else "" for path in outputs(folder, rank))
        finished[rank] = Finished(code=process.exitcode or 0, stdout=out, stderr=err, duration_s=duration_s)

    collectors = [threading.Thread(target=collect, args=(rank,)) for rank in range(num_ranks)]
    for collector in collectors:
        collector.start()
    for collector in collectors:
        collector.join()
    results = [item for item in finished if item is not None]
    if late:
        texts = [f"rank {rank} (exit code {item.code}):\n{item.stderr}" for rank, item in enumerate(results)]
        raise AssertionError("\n".join([f"rank {late[0]} had not ended after {timeout_s} s", *texts]))
    return results


def outputs(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"{rank}.out", folder / f"{rank}.err"


def _main(words: list[str], environment: Mapping[str, str], stdout: str, stderr: str) -> None:
    """Run `python script arguments` with more `environment`, its output in two files."""
    for number, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    show_stacks_at_end()
    os.environ.update(environment)
    sys.argv[:] = words
    sys.path.insert(0, os.path.dirname(words[0]))
    os._exit(ended(words[0]))


def ended(script: str) -> int:
    """Run the script to its end and the interpreter's; the exit code."""
    code: Any = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        code = exit.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code or 0


@functools.cache
def differences(script: str, group: str, num_processes: int) -> list[dict[str, Any]]:
    """What each rank finds, by name (different from the plain program, say): the last line that `script group` prints.

    Args:
        script: Of tests/programs.
        group: Of the programs in it.
        num_processes: How many ranks.
    """
    finished = run_processes(num_processes, script, [group])
    assert [process.stderr for process in finished if process.code] == []
    return [json.loads(process.stdout.splitlines()[-1]) for process in finished]


def differing(found: Sequence[Mapping[str, list[str]]], name: str) -> list[str]:
    """In words, how the distributed program differs from the plain one on each rank; "" where it does not.

    Args:
        found: What each rank has printed; one of them has run the plain program.
        name: Of the program.
    """
    (plain,) = [each[name][0] for each in found if len(each[name]) == 2]
    return [_in_words(plain, each[name][-1]) for each in found]


def _in_words(plain: str, other: str) -> str:
    if plain == other:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
    return f"...{plain[max(0, at - 30) : at + 40]}... plainly, ...{other[max(0, at - 30) : at + 40]}..."

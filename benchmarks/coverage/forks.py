"""Children of a process that has imported torch and transformers already: a rank starts in a tenth of a second."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Ended", "die_with_parent", "run_forked", "warm_up"]

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
STOPPED_S = 2.0
"""More time than this between two looks: somebody has stopped this process, or the machine. It does not count."""
GRACE_S = 20.0
"""How long the others may take to end after one process has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One child that has ended."""

    result: Any
    failure: dict[str, Any] | None
    code: int
    is_late: bool
    """Whether it had to be killed."""
    text: str
    """What it wrote to standard output and standard error."""


def warm_up(*, with_farspan: bool = True) -> None:
    """Import what every child needs, so that forking is all that a child costs."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import warnings

    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    import torch._dynamo
    import torch.distributed.pipelining
    import transformers  # pyright: ignore[reportMissingImports]
    import transformers.modeling_utils  # pyright: ignore[reportMissingImports]
    import transformers.models.auto.modeling_auto  # pyright: ignore[reportMissingImports]

    if with_farspan:
        import farspan.api  # noqa: F401

    transformers.logging.set_verbosity_error()
    gc.freeze()


def die_with_parent() -> None:
    """Let the kernel end this process when the one that forked it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def run_forked(entries: Sequence[Callable[[], Any]], *, timeout_s: float, as_ranks: bool = False) -> list[Ended]:
    """Run each entry in a child; return how they ended, in order. None is left behind.

    With `as_ranks` they find RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as a launcher sets them.
    """
    folder = Path(tempfile.mkdtemp(prefix="coverage"))
    running: dict[int, int] = {}
    codes: dict[int, int] = {}
    late: set[int] = set()
    port = free_port() if as_ranks else 0
    try:
        for number, entry in enumerate(entries):
            ranks = (number, len(entries), port) if as_ranks else None
            pid = os.fork()
            if pid == 0:
                _child(entry, folder / str(number), ranks, timeout_s)  # does not return
            running[pid] = number
        now = time.monotonic()
        end = now + timeout_s
        while running:
            before, now = now, time.monotonic()
            if now - before > STOPPED_S:
                end += now - before
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in running:
                codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
                if status:
                    end = min(end, now + GRACE_S)
            elif now > end:
                late.update(running.values())
                break
            else:
                time.sleep(0.005)
        return [_ended(folder / str(number), codes.get(number, -9), number in late) for number in range(len(entries))]
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _child(entry: Callable[[], Any], path: Path, ranks: tuple[int, int, int] | None, timeout_s: float) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent()
        sys.modules["torch"].set_num_threads(1)  # its pool does not outlive a fork: make it before there are threads
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        output = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable(file=2)
        faulthandler.dump_traceback_later(max(1.0, timeout_s - 3.0), file=2)
        if ranks is not None:
            names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
            os.environ.update({name: str(value) for name, value in zip(names, ranks, strict=True)})
            os.environ.update(
                FARSPAN_FILES="all", MASTER_ADDR="127.0.0.1", LOCAL_RANK=str(ranks[0]), LOCAL_WORLD_SIZE=str(ranks[1])
            )
        try:
            _write(path, {"result": entry()})
            code = 0
        except BaseException as error:
            _write(path, {"failure": describe(error)})
            sys.excepthook(type(error), error, error.__traceback__)  # farspan tells the other ranks there
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _write(path: Path, value: Any) -> None:
    Path(f"{path}.tmp").write_text(json.dumps(value))
    os.replace(f"{path}.tmp", f"{path}.json")


def describe(error: BaseException) -> dict[str, Any]:
    """An exception in a few lines: its kind, its first lines, and the last frames of farspan and of transformers."""
    from farspan import FarspanError
    from farspan.errors import RemoteError

    frames = traceback.extract_tb(error.__traceback__)
    last = {}
    for package in ("farspan", "transformers", "torch"):
        found = [frame for frame in frames if f"/{package}/" in frame.filename]
        if found:
            name = found[-1].filename.rpartition(f"/{package}/")[2]
            last[package] = f"{name}:{found[-1].lineno} {found[-1].name}: {(found[-1].line or '')[:90]}"
    cause = error.__cause__ or error.__context__
    return {
        "kind": type(error).__name__,
        "is_named": isinstance(error, FarspanError),
        "is_remote": isinstance(error, RemoteError),
        "lines": str(error).strip().splitlines()[:4],
        "remote_traceback": getattr(error, "remote_traceback", "")[-3000:],
        "cause": f"{type(cause).__name__}: {str(cause).strip()[:200]}" if cause is not None else "",
        "frames": last,
        "traceback": "".join(traceback.format_exception(error))[-6000:],
    }


def _ended(path: Path, code: int, is_late: bool) -> Ended:
    value: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(Path(f"{path}.json").read_text())
    text = ""
    with contextlib.suppress(OSError):
        text = Path(f"{path}.log").read_text(errors="replace")[-6000:]
    return Ended(result=value.get("result"), failure=value.get("failure"), code=code, is_late=is_late, text=text)

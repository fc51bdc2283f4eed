"""Runs drawn programs: plainly, on ranks that are threads of this process, and in processes of their own.

A worker is a process that keeps torch and farspan loaded and runs one program after the other. As a script, this file
is one rank that is a process: it runs the program of a file, and prints what it has seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "src")) if path not in sys.path]

import psutil  # noqa: E402
import torch  # noqa: E402
from benchmarks.fuzz.compare import Observed, Outcome, compare, observed, outcome_of  # noqa: E402
from benchmarks.fuzz.program import Drawn, Way, draw, is_rounded, source  # noqa: E402

import farspan  # noqa: E402
from farspan import errors  # noqa: E402

RECORDED = {"FARSPAN_RECORD": "1"}
"""One rank alone records too."""
DEADLINE_S = 150.0
PATIENCE_S = 30.0
LEAST_BUSY, MOST_CPU_S = 0.03, 60.0
"""A run that has computed all the time, but not that long, is slow (others use the machine), and does not hang."""
NUM_ATTEMPTS = 20


class Printed:
    """A standard output that keeps what each thread prints."""

    def __init__(self) -> None:
        self.lines: dict[int, list[str]] = {}

    def write(self, text: str) -> int:
        self.lines.setdefault(threading.get_ident(), []).append(text)
        return len(text)

    def flush(self) -> None:
        pass

    @contextlib.contextmanager
    def kept(self) -> Iterator[list[str]]:
        """Gives a list of what this thread prints."""
        self.lines[threading.get_ident()] = found = []
        yield found
        del self.lines[threading.get_ident()]


def module_of(text: str, name: str, *, write: bool = True) -> Callable[[], types.ModuleType]:
    """A function that makes the program's module anew: each rank has its own globals and classes."""
    file = os.path.join(tempfile.gettempdir(), f"{name}.py")
    if write:
        Path(file).write_text(text)
    code = compile(text, file, "exec")

    def make() -> types.ModuleType:
        module = types.ModuleType(name)
        module.__file__ = file
        sys.modules[name] = module
        exec(code, module.__dict__)
        return module

    return make


def run_plainly(make: Callable[[], types.ModuleType], *, dtype: torch.dtype = torch.float32) -> Observed:
    """What the program shows without farspan."""
    module = make()
    with printing().kept() as printed:
        model = module.build()
        if dtype != torch.float32:
            module.__dict__["DTYPE"] = dtype
            model = model.to(dtype)
        return observed(module.train, model, printed)


def run_on_ranks(make: Callable[[], types.ModuleType], way: Way) -> list[Observed]:
    """What the program shows on each rank."""
    from tests.support.ranks import run_threads

    if way.get("processes"):
        return _run_as_processes(make, way)

    modules = [make() for _ in range(way["ranks"])]
    models: list[Any] = []
    for module in modules:  # one after the other: threads share torch's generator
        with farspan.deferred_init() if way.get("deferred") else contextlib.nullcontext():
            models.append(module.build())
    cache = tempfile.mkdtemp()
    os.environ["XDG_CACHE_HOME"] = cache  # no plan is found that an earlier run has kept

    def program(rank: int) -> Observed:
        module, model = modules[rank], models[rank]
        if way.get("from_rank"):
            group = farspan.rank()
            module.__dict__["GIVEN"] = lambda read: farspan.from_rank(0, read() if group == 0 else None)
        with printing().kept() as printed:
            model = farspan.distribute(model, **way["options"])
            return observed(module.train, model, printed)

    try:
        return run_threads(way["ranks"], program, deadline_s=DEADLINE_S, patience_s=PATIENCE_S)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
        _forget()


def is_of_processes(drawn: Drawn, way: Way) -> bool:
    """Whether ranks are processes: groups are divided there, and threads share what optimizers draw from."""
    return "data_parallel" in way["options"] or drawn["loop"]["optimizer"] == "Noisy"


def _run_as_processes(make: Callable[[], types.ModuleType], way: Way) -> list[Observed]:
    from tests.support.ranks import run_processes

    words = [str(make().__file__), json.dumps(way)]
    deadline = {"FARSPAN_DEADLINE": str(DEADLINE_S)}
    finished = run_processes(way["ranks"], __file__, words, timeout_s=DEADLINE_S + PATIENCE_S, environment=deadline)
    found = [_error_in(process.stderr) for process in finished if process.code]
    if found:
        raise min(found, key=lambda error: isinstance(error, errors.RemoteError))
    return [Observed(**json.loads(process.stdout.splitlines()[-1])) for process in finished]


def _error_in(text: str) -> Exception:
    """The error that a process has ended with, from what it wrote."""
    lines = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    name, _, message = (lines or ["RuntimeError: it has not said why"])[-1].partition(": ")
    kind = getattr(errors, name.rpartition(".")[2], RuntimeError)
    return kind(f"{name}: {message}" if kind is RuntimeError and name != "RuntimeError" else message)


def _forget() -> None:
    """Leaves nothing of a run's models: else each run would be slower than the one before."""
    from farspan.record import intercept
    from farspan.record.parameters import gradient_property

    intercept._recorder_of_module.clear()
    gradient_property._recorders.clear()


def printing() -> Printed:
    if not isinstance(sys.stdout, Printed):
        sys.stdout = Printed()  # pyright: ignore[reportAttributeAccessIssue]
    return sys.stdout  # pyright: ignore[reportReturnType]


def drawn_with_plain(seed: int, number: int) -> tuple[Drawn, Observed]:
    """The program of that number, and what it shows plainly: the first attempt that runs."""
    for attempt in range(NUM_ATTEMPTS):
        drawn = draw(seed, number, attempt)
        plain = plainly(drawn, f"program_{seed}_{number}_{attempt}")
        if plain is not None:
            return drawn, plain
    raise RuntimeError(f"no attempt at program {number} runs plainly")


def plainly(drawn: Drawn, name: str) -> Observed | None:
    """What a program shows plainly; None where it raises, or has numbers that are none."""
    make = module_of(source(drawn), name)
    try:
        plain = run_plainly(make)
    except Exception:
        return None
    if "nan" in repr(plain) or "inf" in repr(plain.recorded):
        return None  # any number may be behind them
    return plain


def outcome(drawn: Drawn, way: Way, plain: Observed, name: str) -> Outcome:
    """How the program on ranks compares with the plain one."""
    make = module_of(source(drawn), name)
    try:
        exact = run_plainly(make, dtype=torch.float64) if is_rounded(way) else None
    except Exception:
        exact = plain  # a plain tensor of float32, say: the floor of rounding counts
    began_s, began_cpu_s = time.monotonic(), _cpu_s()
    try:
        ranks = run_on_ranks(make, {**way, "processes": is_of_processes(drawn, way)})
    except BaseException as error:
        found, cpu_s = outcome_of(error), _cpu_s() - began_cpu_s
        if found.kind == "hang" and LEAST_BUSY * (time.monotonic() - began_s) < cpu_s < MOST_CPU_S:
            return Outcome(kind="slow", text=f"not at its end after {cpu_s:.0f} s of processor")
        return found
    return compare(plain, ranks, exact)


def as_processes(file: str, num_ranks: int) -> str:
    """How a file that runs alone differs where ranks are processes: rank 0's lines against the plain ones."""
    from tests.support.ranks import run_processes

    cache = {"XDG_CACHE_HOME": tempfile.mkdtemp(), "FARSPAN_DEADLINE": "20"}
    (plain,) = run_processes(1, file, timeout_s=60.0, environment=cache)
    try:
        first, *_ = ranks = run_processes(num_ranks, file, ["--farspan"], timeout_s=60.0, environment=cache)
    except AssertionError:
        return "processes do not end"
    if any(one.code for one in ranks):
        error = _error_in(next(one for one in ranks if one.code).stderr)
        return f"processes end in: {type(error).__name__}: {str(error)[:160]}"
    wanted, found = plain.stdout.splitlines(), first.stdout.splitlines()
    number = sum(a != b for a, b in zip(wanted, found, strict=False)) + abs(len(wanted) - len(found))
    return f"as processes {number} of {len(wanted)} lines differ"


def serve(connection: Connection, folder: str) -> None:
    """Answers tasks until None comes: ("run", seed, number), ("try", drawn, ways) or ("confirm", file, num_ranks)."""
    log = os.open(os.path.join(folder, f"worker_{os.getpid()}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    tempfile.tempdir = folder
    os.environ |= RECORDED
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.freeze()  # what is loaded stays, and no collection goes through it
    gc.set_threshold(10_000, 10, 10)
    count = 0
    with contextlib.suppress(EOFError, BrokenPipeError):  # nobody asks any more
        while (task := connection.recv()) is not None:
            count += 1
            try:
                answer = _answer(task, count)
            except Exception:
                answer = {"failed": traceback.format_exc()}
            connection.send(answer)


def _cpu_s() -> float:
    """Seconds of processor of this process, and of those that it has started."""
    others = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(sum(times[:4]) for times in others)


def _answer(task: tuple[Any, ...], count: int) -> dict[str, Any]:
    began = _cpu_s()
    if task[0] == "confirm":
        return {"confirmed": as_processes(*task[1:])}
    if task[0] == "run":
        _, seed, number = task
        drawn, plain = drawn_with_plain(seed, number)
        name = f"program_{seed}_{number}"
        ways = drawn["ways"]
    else:
        _, drawn, ways = task
        name = f"shrunk_{os.getpid()}_{count}"
        plain = plainly(drawn, name)
        if plain is None:
            return {"drawn": drawn, "outcomes": [], "cpu_s": _cpu_s() - began}
    outcomes = []
    for at, way in enumerate(ways):
        found = outcome(drawn, way, plain, f"{name}_{at}")
        outcomes.append(dataclasses.asdict(found))
        if found.kind in ("hang", "slow"):
            break
    return {"drawn": drawn, "outcomes": outcomes, "cpu_s": _cpu_s() - began}


def run_rank() -> None:
    """Runs the program of a file on this rank."""
    os.environ |= RECORDED | {"XDG_CACHE_HOME": tempfile.mkdtemp()}
    out = sys.stdout
    file, way = Path(sys.argv[1]), json.loads(sys.argv[2])
    module = module_of(file.read_text(), file.stem, write=False)()
    with printing().kept() as printed:
        model = farspan.distribute(module.build(), **way["options"])
        found = observed(module.train, model, printed)
    print(json.dumps(dataclasses.asdict(found)), file=out)


if __name__ == "__main__":
    run_rank()

"""A process that keeps torch and farspan loaded and runs drawn programs, one after the other."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NUM_ATTEMPTS = 20


def prepare() -> None:
    """Loads what a program needs, and settles what would differ from run to run."""
    os.environ["FARSPAN_RECORD"] = "1"
    for path in (str(ROOT / "src"), str(ROOT)):
        if path not in sys.path:
            sys.path.insert(0, path)
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def drawn_with_plain(seed: int, number: int) -> tuple[dict[str, Any], Any]:
    """The program of that number, and what it shows plainly: the first attempt that runs."""
    from benchmarks.fuzz.program import draw

    for attempt in range(NUM_ATTEMPTS):
        drawn = draw(seed, number, attempt)
        plain = plainly(drawn, f"program_{seed}_{number}_{attempt}")
        if plain is not None:
            return drawn, plain
    raise RuntimeError(f"no attempt at program {number} runs plainly")


def plainly(drawn: dict[str, Any], name: str) -> Any:
    """What a program shows plainly, twice the same; None where it raises, or differs from run to run."""
    from benchmarks.fuzz.program import source
    from benchmarks.fuzz.ways import module_of, run_plainly

    make = module_of(source(drawn), name)
    try:
        plain = run_plainly(make)
    except Exception:
        return None
    if "nan" in repr(plain) or "inf" in repr(plain.recorded):
        return None  # any number may be behind them
    return plain


def outcome(drawn: dict[str, Any], way: dict[str, Any], plain: Any, name: str) -> Any:
    """How the program on ranks compares with the plain one."""
    import torch
    from benchmarks.fuzz.compare import compare, outcome_of
    from benchmarks.fuzz.program import source
    from benchmarks.fuzz.ways import is_rounded, module_of, run_on_ranks, run_plainly

    make = module_of(source(drawn), name)
    try:
        exact = run_plainly(make, dtype=torch.float64) if is_rounded(way) else None
    except Exception:
        exact = plain  # a plain tensor of float32, say: the floor of rounding counts
    try:
        ranks = run_on_ranks(make, way)
    except BaseException as error:
        found = outcome_of(error)
        if os.environ.get("FUZZ_VERBOSE"):
            traceback.print_exc()
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
        text = next(one for one in ranks if one.code).stderr.strip().splitlines()
        return f"processes end in: {next((line for line in text if 'Error' in line), '')[:160]}"
    wanted, found = plain.stdout.splitlines(), first.stdout.splitlines()
    number = sum(a != b for a, b in zip(wanted, found, strict=False)) + abs(len(wanted) - len(found))
    return f"as processes {number} of {len(wanted)} lines differ"


def serve(connection: Connection, folder: str) -> None:
    """Answers tasks until None comes: ("run", seed, number) or ("try", drawn, way)."""
    log = os.open(os.path.join(folder, f"worker_{os.getpid()}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    tempfile.tempdir = folder
    prepare()
    count = 0
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    while (task := connection.recv()) is not None:
        count += 1
        try:
            connection.send(_answer(task, count))
        except Exception:
            connection.send({"failed": traceback.format_exc()})


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _answer(task: tuple[Any, ...], count: int) -> dict[str, Any]:
    began = time.process_time()
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
            return {"drawn": drawn, "outcomes": [], "cpu_s": time.process_time() - began}
    outcomes = []
    for at, way in enumerate(ways):
        found = outcome(drawn, way, plain, f"{name}_{at}")
        outcomes.append(dataclasses.asdict(found))
        if found.kind == "hang":
            break
    return {"drawn": drawn, "outcomes": outcomes, "cpu_s": time.process_time() - began}

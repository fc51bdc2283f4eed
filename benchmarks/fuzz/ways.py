"""Draws ways to run a program, and runs it so: plainly, or on ranks that are threads of this process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.fuzz.compare import Observed, observed
from benchmarks.fuzz.models import DRAWING, kinds_of, names_of

DEADLINE_S = 20.0
PATIENCE_S = 15.0
ROUNDED = ("micro_batches", "tensor_parallel")
"""Options with which numbers are those of one process up to rounding."""

Way = dict[str, Any]
"""{"ranks": 2, "options": {..}, "from_rank": False, "deferred": False}"""


def draw_ways(rng: random.Random, model: dict[str, Any], loop: dict[str, Any]) -> list[Way]:
    """Two ways: one with the first step measured, as by default, and another."""
    draws = bool(kinds_of(model) & {*DRAWING}) or "draws" in loop["features"]
    default: Way = {"ranks": rng.choice((2, 2, 2, 3, 3, 4)), "options": {}}
    for way in (ways := [default, _draw_other(rng, model, exact=draws or loop["optimizer"] == "LBFGS")]):
        if "data_parallel" not in way["options"]:
            way["ranks"] = min(way["ranks"], len(names_of(model)))
    return ways


def _draw_other(rng: random.Random, model: dict[str, Any], *, exact: bool) -> Way:
    ranks = rng.choice((1, 2, 2, 2, 3, 3, 4))
    way: Way = {"ranks": ranks, "options": {}}
    options = way["options"]
    kinds = ["measure", "measure", "plan", "plan", "plan", "schedule", "remat"]
    kind = rng.choice(kinds if exact else [*kinds, "data", "shard", "micro_batches", "tensor"])
    match kind:
        case "measure":
            options["measure"] = False
        case "plan":
            names = names_of(model)
            if model["cells"] and rng.random() < 0.5:
                names = [*(name for name in names if not name.startswith("cells")), "cells"]
            ranks = way["ranks"] = min(ranks, len(names))
            places = [*range(ranks), *(rng.randrange(ranks) for _ in names[ranks:])]
            rng.shuffle(places)
            options["plan"] = {name: f"rank:{place}" for name, place in zip(names, places, strict=True)}
        case "schedule":
            options |= {"schedule": rng.choice(("auto", "zero-bubble", "1f1b", "gpipe")), "measure": False}
        case "remat":
            options["remat"] = True
        case "data":
            way["ranks"] = rng.choice((2, 4))
            options["data_parallel"] = 2
        case "shard":
            way["ranks"] = rng.choice((2, 4))
            options |= {"data_parallel": 2, "shard": rng.choice(("optimizer", "parameters"))}
        case "micro_batches":
            way["ranks"] = max(2, ranks)
            options["micro_batches"] = 2
        case _:
            way["ranks"] = 2
            options["tensor_parallel"] = 2
    if kind in ("plan", "measure", "schedule"):
        way["from_rank"] = rng.random() < 0.15
        way["deferred"] = rng.random() < 0.15
    return way


def is_rounded(way: Way) -> bool:
    return any(name in way["options"] for name in ROUNDED)


def in_words(way: Way) -> str:
    """A way on one line."""
    parts = [f"{way['ranks']} ranks", *(f"{key}={value!r}" for key, value in way["options"].items())]
    return ", ".join([*parts, *(key for key in ("from_rank", "deferred") if way.get(key))])


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
    def kept(self):
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
    """What the program shows on each rank.

    Groups are divided where processes find each other, so those of `data_parallel` are processes.
    """
    from tests.support.ranks import run_threads

    import farspan

    if "data_parallel" in way["options"]:
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
            module.__dict__["GIVEN"] = lambda batch: farspan.from_rank(0, batch if group == 0 else None)
        with printing().kept() as printed:
            model = farspan.distribute(model, **way["options"])
            return observed(module.train, model, printed)

    try:
        return run_threads(way["ranks"], program, deadline_s=DEADLINE_S, patience_s=PATIENCE_S)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
        _forget()


def _run_as_processes(make: Callable[[], types.ModuleType], way: Way) -> list[Observed]:
    from tests.support.ranks import run_processes

    file = make().__file__
    words = [str(file), json.dumps(way)]
    finished = run_processes(
        way["ranks"], Path(__file__).parent / "rank.py", words, timeout_s=DEADLINE_S + PATIENCE_S,
        environment={"FARSPAN_DEADLINE": str(DEADLINE_S)},
    )  # fmt: skip
    for process in finished:
        if process.code:
            raise RuntimeError(process.stderr.strip().splitlines()[-1] if process.stderr.strip() else str(process.code))
    return [Observed(**json.loads(process.stdout.splitlines()[-1])) for process in finished]


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

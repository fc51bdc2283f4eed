"""Faults that are switched on and off in a process that keeps torch and farspan loaded.

A fault is text in a copy of its file: the functions that come out otherwise get the code that they have there, and get
their own back. A probe, before the first statement that the fault changes, says whether a run has come to it, and it
made a difference there (`when`): with a fault to which it has not come a program gives what it gives without.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import gc
import importlib
import os
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from benchmarks.fuzz import ranks
from benchmarks.fuzz.compare import Outcome
from benchmarks.fuzz.faults import FAULTS, Fault
from benchmarks.fuzz.program import Drawn, Way, draw, in_words, source

import farspan

__all__ = ["faulted_text", "serve"]

FINDINGS = ("wrong", "printed", "unnamed", "crash", "hang")
PACKAGE = Path(farspan.__file__).parent
OF_PROCESSES = ("execute/data_axis/", "execute/shards/")
"""Faults of these rooms are what programs are run with whose ranks are processes."""
_Codes = dict[tuple[str, int], types.CodeType]


def faulted_text(fault: Fault, package: Path) -> str:
    text = (package / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: its text is {text.count(fault.old)} times in {fault.file}")
    return text.replace(fault.old, fault.new)


def line_of(fault: Fault, text: str) -> int:
    """The first line that a fault changes."""
    pairs = zip(fault.old, fault.new, strict=False)
    same = next((at for at, (old, new) in enumerate(pairs) if old != new), min(len(fault.old), len(fault.new)))
    same += len(fault.old[same:]) - len(fault.old[same:].lstrip())
    return text[: text.index(fault.old) + same].count("\n") + 1


def probed(text: str, faults: Sequence[Fault]) -> ast.Module:
    """A file with a probe for each fault before the innermost statement that it changes first; where an `if` is left
    out as a whole, inside of that."""
    tree = ast.parse(text)
    for fault in faults:
        line = line_of(fault, text)
        places = [
            (body, statement)
            for node in ast.walk(tree)
            for field in ("body", "orelse", "finalbody")
            if isinstance(body := getattr(node, field, None), list)
            for statement in body
            if isinstance(statement, ast.stmt) and statement.lineno <= line <= (statement.end_lineno or 0)
        ]
        body, statement = min(places, key=lambda place: (place[1].end_lineno or 0) - place[1].lineno)
        if isinstance(statement, ast.If) and statement.lineno == line and not fault.new.strip():
            body, statement = statement.body, statement.body[0]
        (probe,) = ast.parse(f"if {fault.when or True}: _farspan_reached({fault.name!r})").body
        for node in ast.walk(probe):
            ast.copy_location(node, statement)
        body.insert(body.index(statement), probe)
    return tree


def codes_in(code: types.CodeType) -> _Codes:
    """The codes of functions that are not inside of others, by name and number among those of the name."""
    found: _Codes = {}
    count = Counter[str]()
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            is_class = not item.co_flags & 2  # no fast locals: the body of a class
            for each in codes_in(item).values() if is_class else [item]:
                found[each.co_qualname, count[each.co_qualname]] = each
                count[each.co_qualname] += 1
    return found


class Switches:
    """The functions of this process that faults change."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.reached: set[str] = set()
        builtins._farspan_reached = self.reached.add  # pyright: ignore[reportAttributeAccessIssue]
        self._own: dict[str, _Codes] = {}
        self._faulted: dict[str, _Codes] = {}
        for file in dict.fromkeys(fault.file for fault in faults):
            importlib.import_module("farspan." + file.removesuffix(".py").replace("/", "."))
            path, mine = PACKAGE / file, [fault for fault in faults if fault.file == file]
            text = path.read_text()
            self._own[file] = codes_in(compile(probed(text, mine), str(path), "exec"))
            for fault in mine:
                codes = codes_in(compile(faulted_text(fault, PACKAGE), str(path), "exec"))
                self._faulted[fault.name] = codes
        self._functions: dict[tuple[str, str], list[Any]] = {}
        gc.unfreeze()  # a forked rank does not find what its server has frozen
        for item in gc.get_objects():
            if type(item) is types.FunctionType and item.__code__.co_filename.startswith(str(PACKAGE)):
                key = (os.path.relpath(item.__code__.co_filename, PACKAGE), item.__code__.co_qualname)
                self._functions.setdefault(key, []).append(item)
        for functions in self._functions.values():
            functions.sort(key=lambda function: function.__code__.co_firstlineno)
        for file in self._own:
            self._put(file, self._own[file])

    def _put(self, file: str, codes: _Codes) -> None:
        for (name, number), code in codes.items():
            functions = self._functions.get((file, name), [])
            lines = sorted({function.__code__.co_firstlineno for function in functions})
            for function in functions:
                if lines.index(function.__code__.co_firstlineno) == number:
                    function.__code__ = code

    @contextlib.contextmanager
    def on(self, fault: Fault) -> Iterator[None]:
        self._put(fault.file, self._faulted[fault.name])
        try:
            yield
        finally:
            self._put(fault.file, self._own[fault.file])


def is_looked_for(fault: Fault, drawn: Drawn, way: Way) -> bool:
    """Whether a program and its way have what a fault needs."""
    text = f"{source(drawn)}\n{in_words(way)}"
    return all(any(each in text for each in part.split("|")) for part in fault.needs.split(" & "))


def try_faults(
    switches: Switches, seed: int, number: int, wanted: Sequence[Fault], *, all_ways: bool
) -> dict[str, Any]:
    """Runs a program without a fault, and with each of those that it comes to until one is found in it.

    Args:
        switches: Of this process.
        seed: Of the programs.
        number: Of the program.
        wanted: The faults that have not been found.
        all_ways: Whether they are looked for in each program, and not only where they find what they need.

    Returns:
        `found`, outcomes by fault; `reached`, names; `clean`, outcomes without; `is_over`, whether this process is good
        for no more.
    """
    answer: dict[str, Any] = {"found": {}, "reached": [], "clean": [], "is_over": False}
    drawn = draw(seed, number)
    if not all_ways and not any(is_looked_for(each, drawn, way) for each in wanted for way in drawn["ways"]):
        return answer
    drawn, plain = ranks.drawn_with_plain(seed, number)
    name = f"program_{seed}_{number}"

    def run(way: Any) -> Outcome:
        return ranks.outcome(drawn, way, plain, name)

    for way in drawn["ways"]:
        is_apart = ranks.is_of_processes(drawn, way)
        here = [each for each in wanted if (all_ways and not is_apart) or is_looked_for(each, drawn, way)]
        if is_apart:
            here = [each for each in here if each.file.startswith(OF_PROCESSES) or "Noisy" in each.needs]
        if not here:
            continue
        switches.reached.clear()
        clean = run(way)
        answer["clean"].append([clean.kind, clean.text[:200]])
        if clean.kind in FINDINGS:
            answer["is_over"] |= clean.kind == "hang"
            continue
        reached = {each.name for each in here} if is_apart else {*switches.reached}
        answer["reached"] = sorted({*answer["reached"], *reached})
        for fault in [each for each in here if each.name in reached and each.name not in answer["found"]]:
            with switches.on(fault):
                found = run({**way, "fault": fault.name} if is_apart else way)
            if found.kind not in FINDINGS:
                continue
            if run(way).kind in FINDINGS:  # the fault has left something, or the machine is too slow
                answer["is_over"] = True
                return answer
            answer["found"][fault.name] = [found.kind, found.text[:200]]
            if found.kind == "hang":
                answer["is_over"] = True
                return answer
    return answer


def serve(connection: Connection, folder: str) -> None:
    """Answers (seed, number, names of faults, whether in all ways) until nobody asks."""
    log = os.open(os.path.join(folder, f"worker_{os.getpid()}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    tempfile.tempdir = folder
    os.environ |= ranks.RECORDED
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ranks.__file__ = __file__  # what is run on ranks that are processes
    importlib.import_module("tests.support.ranks")
    switches = Switches(FAULTS)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            seed, number, names, all_ways = connection.recv()
            wanted = [each for each in FAULTS if each.name in names]
            connection.send(try_faults(switches, seed, number, wanted, all_ways=all_ways))


if __name__ == "__main__":
    import json
    import sys

    chosen = json.loads(sys.argv[2]).get("fault")
    with contextlib.ExitStack() as stack:
        for each in [each for each in FAULTS if each.name == chosen]:
            stack.enter_context(Switches([each]).on(each))
        ranks.run_rank()

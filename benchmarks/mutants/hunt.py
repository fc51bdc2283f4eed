"""Which tests notice which planted fault: the order that the plugin in `forked.py` carries out, and its rows."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.mutants.choose import LeftOut
from benchmarks.mutants.plant import Point, points_of
from benchmarks.mutants.reached import Map
from benchmarks.mutants.suite import pytest_command, read_rows

__all__ = ["Found", "hunt", "read_hunt", "tests_of"]

_SHORTEST_LIMIT_S = 20.0
_LIMIT = 6.0
"""Times the mapped duration."""
_NEAR = 0.2
"""Tests of the fault's room are asked as early as others that take a fifth of their time."""


@dataclass(kw_only=True)
class Found:
    """What has been found out about a fault.

    Attributes:
        fault: Its number.
        noticed_by: Tests.
        is_capped: Whether there was no time for all tests that reach it.
        unsure: Tests that failed without the fault, too.
        digests: Of the choices of tests that it has been hunted with.
    """

    fault: int
    noticed_by: list[str] = field(default_factory=list)
    is_capped: bool = False
    unsure: list[str] = field(default_factory=list)
    digests: set[str] = field(default_factory=set)


def hunt(
    tree: Path,
    folder: Path,
    left_out: LeftOut,
    *,
    num_workers: int,
    budget_s: float,
    quick_budget_s: float,
    is_all: bool,
    is_again: bool,
    only: Iterable[int] = (),
) -> int:
    """Hunts the faults that have no row yet; returns pytest's exit code.

    Args:
        tree: With the planted faults.
        folder: Of the rows: `map*.jsonl`, and `hunt.jsonl` which is written.
        left_out: The tests that are not in the quick tier.
        num_workers: Faults at a time.
        budget_s: Seconds for the tests that are left out, for each fault.
        quick_budget_s: Seconds for those of the quick tier.
        is_all: Whether all tests are run, and not only up to the first that notices the fault.
        is_again: Whether faults that only tests outside the quick tier are known to notice are hunted again.
        only: Numbers of faults; all without.
    """
    found = read_hunt(folder)
    tests = read_rows(folder)
    jobs: list[dict[str, Any]] = []
    digest = left_out.digest
    for point in points_of(tree):
        if point.rule == "block" or (only and point.number not in only):
            continue
        known = found.get(point.number)
        if known is not None:
            is_open = not any(name not in left_out for name in known.noticed_by) and digest not in known.digests
            if not (is_again and is_open):
                continue
        names = tests_of(point, tests)
        quick = [name for name in names if name not in left_out]
        jobs.append({"fault": point.number, "quick": quick, "rest": [name for name in names if name in left_out]})
    used = sorted({name for job in jobs for name in (*job["quick"], *job["rest"])})
    if not used:
        return 0
    order = folder / "order.json"
    forks = folder / "forks"
    shutil.rmtree(forks, ignore_errors=True)
    forks.mkdir()
    content = {
        "jobs": jobs,
        "limits_s": {name: max(_SHORTEST_LIMIT_S, _LIMIT * tests.whole_wall_s(name)) for name in used},
        "folder": str(forks),
        "rows": str(folder / "hunt.jsonl"),
        "num_workers": num_workers,
        "budgets_s": {"quick": quick_budget_s, "rest": budget_s},
        "is_all": is_all,
        "digest": digest,
    }
    order.write_text(json.dumps(content))
    files = sorted({"src" if name.startswith("src/") else name.partition("::")[0] for name in used})
    command, environment = pytest_command(tree, "benchmarks.mutants.forked", ["-s", *files])
    with (folder / "hunt.log").open("ab") as log:
        return subprocess.run(
            command,
            cwd=tree,
            env={**environment, "MUTANTS_JOBS": str(order)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=False,
        ).returncode


def tests_of(point: Point, tests: Map) -> list[str]:
    """The tests that reach a point, and pass without a fault: what is cheap or of the same room first."""
    bit = 1 << point.number
    names = [name for name, mask in tests.whole_masks.items() if mask & bit and tests.tests[name].outcome == "passed"]

    def cost(name: str) -> float:
        return tests.whole_cost_s(name) * (_NEAR if point.room in name.partition("::")[0].split("/") else 1.0)

    return sorted(names, key=lambda name: (cost(name), name))


def read_hunt(folder: Path) -> dict[int, Found]:
    """What has been found, by fault; of one that was hunted several times, all that noticed it."""
    found: dict[int, Found] = {}
    file = folder / "hunt.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        each = found.setdefault(row["fault"], Found(fault=row["fault"]))
        each.noticed_by += [by["test"] for by in row["noticed_by"] if by["test"] not in each.noticed_by]
        each.is_capped = bool(row["capped"])
        each.unsure += row["unsure"]
        each.digests.add(row["digest"])
    return found

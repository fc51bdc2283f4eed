"""How long the way of a warm micro-batch is: what somebody has to read who wants to know what happens in one."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.ranks import run_processes

PROGRAM = Path(__file__).with_name("warm_step.py")
MOST_FILES, MOST_OF_A_STEP = 29, 76
"""Passed by a micro-batch, and by its step too. To be lowered, not raised: what is rare is asked for once, not in a
file of its own in every micro-batch. Without the control room's: which thread sees a message, and when, is luck.
"""
IN_ORDER = [
    "record/intercept.py",
    "graph/graph.py",
    "program/cache.py",
    "execute/step/executor.py",
    "comm/channels.py",
]
"""Each room by what is passed of it first; the engine, which calls them all, is not one of them."""


def files(passed: list[str]) -> list[str]:
    return list(dict.fromkeys(name.partition(" ")[0] for name in passed))


def test_a_micro_batch_passes_few_files_in_the_order_of_the_rooms() -> None:
    runs = run_processes(2, PROGRAM)
    for run in runs:
        assert run.code == 0, run.stderr
    (said,) = [run.stdout.splitlines()[-1] for run in runs if run.stdout]
    phases = json.loads(said)
    passed = [*phases["forward"], *phases["backward"], *phases["share"]]
    own = [file for file in files(passed) if not file.startswith("control/")]
    assert len(own) <= MOST_FILES, "\n".join(sorted(own))
    assert len(files([*passed, *phases["step"]])) <= MOST_OF_A_STEP, "\n".join(
        sorted(files([*passed, *phases["step"]]))
    )
    assert [file for file in files(passed) if file in IN_ORDER] == IN_ORDER

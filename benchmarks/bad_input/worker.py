"""Tries one case after another, in a process that is used again: a line of JSON for each that comes in, and one out.

{"folder": ..., "call": ..., "words": [...], "variables": {...}}
{"code": 2, "output": "...", "traceback": ""}
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from typing import Any


def call(case: dict[str, Any]) -> int:
    """Reads, or runs the command line; the exit code."""
    from farspan.errors import FarspanError

    if case["call"] == "cli":
        from farspan.cli.main import main

        return main(case["words"])
    try:
        if case["call"] == "plan":
            from farspan.plan import Plan

            print(Plan.load("plan.json"))
        else:
            from farspan.launch.environment import read_environment

            print(read_environment(case["variables"]))
    except FarspanError as error:
        print(error)
        return 2
    return 0


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """What comes of a case."""
    os.chdir(case["folder"])
    before = dict(os.environ)
    if case["call"] == "cli":
        os.environ.update(case["variables"])
    found, output = "", io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = call(case)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        code, found = 1, traceback.format_exc()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return {"code": code, "output": output.getvalue()[:200_000], "traceback": found[-2000:]}


def main() -> None:
    """Until there is no more case."""
    import farspan.planner
    import farspan.report  # noqa: F401

    replies = os.fdopen(os.dup(1), "w")
    silent = os.open(os.devnull, os.O_RDWR)
    os.dup2(silent, 1)  # what started processes print is not an answer
    os.dup2(silent, 2)
    print(json.dumps({}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()

"""Two actors and a learner that calls them: actor 0 kills itself in the middle of a call, again and again."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import farspan
from farspan.errors import ServiceError


class Actor:
    def __init__(self, note: Path) -> None:
        self._note = note

    def act(self) -> int:
        return os.getpid()

    def die(self) -> None:
        self._note.write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    out, number = Path(sys.argv[1]), int(sys.argv[2])
    note = out.with_suffix(".died")
    if farspan.role() == "actor":
        farspan.expose(f"actor-{farspan.rank()}", Actor(note)).wait()
    first, second = (farspan.service(f"actor-{rank}", timeout=100) for rank in range(2))
    rows: list[dict[str, float]] = []
    pids = {second.act()}
    for _ in range(number):
        try:
            first.die()
        except ServiceError as error:
            noticed, is_loss = time.monotonic(), error.is_loss
        assert is_loss
        first.act()
        rows.append({"died": float(note.read_text()), "error": noticed, "back": time.monotonic()})
        pids.add(second.act())
    assert len(pids) == 1, "the other actor has ended too"
    out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

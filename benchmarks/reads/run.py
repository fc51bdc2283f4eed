"""Reads: one rank asks for what others have. How long it takes, and how much of it passes rank 0's hub.

state    rank 1 alone reads the state_dict of a model of 200 MiB, a third on each of three ranks
value    rank 1 alone reads a value of 16 MiB that rank 2 has computed
small    the same with 4 KiB
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402

NUM_RANKS = 3
READER = 1
MIB = 1 << 20
BAR_BYTES = 64 << 10
"""Through the hub, of one phase; its payloads are decisions."""


def count_at_hub() -> Callable[[], int]:
    """Lets the hub of this process count from now on the bytes of payloads that come to it; how many there were."""
    from farspan.control.hub.server import HubServer

    counted = 0
    hear = HubServer._hear

    def heard(self: Any, conn: Any, rank: int, frame: Any) -> None:
        nonlocal counted
        counted += len(frame.payload)
        hear(self, conn, rank, frame)

    HubServer._hear = heard
    return lambda: counted


def worker(file: str, turns: int) -> None:
    import farspan
    from farspan.execute.process.world import current_engine

    torch.set_num_threads(1)
    counted = count_at_hub()
    layers = [nn.Linear(2048, 2048, bias=False) for _ in range(12)] + [nn.Linear(2048, 1024, bias=False)]
    model = farspan.distribute(nn.Sequential(*layers), plan={str(n): n * NUM_RANKS // 13 for n in range(13)}, seed=0)
    engine = current_engine()
    assert engine is not None
    num_phases = 0
    rows: dict[str, list[float]] = {}
    passed: dict[str, list[int]] = {}

    def phase(name: str, act: Callable[[], Any]) -> None:
        nonlocal num_phases
        engine.agreement.barrier(f"begin {num_phases}")
        before, began = counted(), time.perf_counter()
        if engine.rank == READER:
            act()
        rows.setdefault(name, []).append(time.perf_counter() - began)
        engine.agreement.barrier(f"end {num_phases}")
        passed.setdefault(name, []).append(counted() - before)
        num_phases += 1

    with torch.no_grad():
        out = model(torch.ones(1, 2048))
        large = [out.repeat(4096, 1) + number for number in range(turns)]
        small = [out + number for number in range(20 * turns)]
    large[-1].sum().item()
    for number in range(turns):
        phase("value", lambda number=number: large[number].numpy())
        phase("small", lambda number=number: [each.numpy() for each in small[20 * number : 20 * number + 20]])
        phase("state", lambda: [tensor.numpy() for tensor in model.state_dict().values()])
        engine.parameters_changed()
    found = {"rank": engine.rank, "times": rows, "passed": passed}
    shared = [json.loads(part) for part in engine.agreement.gather("found", json.dumps(found).encode())]
    if engine.rank == 0:
        Path(file).write_text(json.dumps({"times": shared[READER]["times"], "passed": passed}))


def main() -> None:
    args = arguments(__doc__).parse_args()
    turns = 3 if args.quick else 7
    if args.worker:
        worker(args.worker, turns)
        return
    words = ["--quick"] if args.quick else []
    rows: list[dict[str, Any]] = []
    for same_host in ("1", "0"):
        found = run_ranks(__file__, NUM_RANKS, words, timeout_s=300, environment={"FARSPAN_SAME_HOST": same_host})
        for name, times in found["times"].items():
            num = 20 if name == "small" else 1
            row = {
                "what": name,
                "same_host": same_host == "1",
                "time_s": median(times[1:]) / num,
                "first_s": times[0] / num,
            }
            rows.append({**row, "hub_bytes": max(found["passed"][name])})
            print(
                f"{name:6} same host {same_host}: {row['time_s'] * 1e3:9.2f} ms (first {row['first_s'] * 1e3:9.2f} ms),"
                f" {rows[-1]['hub_bytes']:12,} bytes through the hub",
                flush=True,
            )
    most = max(row["hub_bytes"] for row in rows)
    finish(
        args, rows=rows, figure=f"{most:,} bytes of a read through the hub (bar {BAR_BYTES:,})", holds=most <= BAR_BYTES
    )


if __name__ == "__main__":
    main()

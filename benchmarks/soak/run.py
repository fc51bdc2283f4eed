"""Whether memory stays what it is: resident memory of every rank over thousands of steps.

A perceptron with dropout, AdamW and `loss.item()` in each step, with steps of one size and with steps of ever new
sizes. What a rank holds is noted ten times after the warm-up; beside it the same loop without farspan.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402

import farspan  # noqa: E402
from farspan.execute.process.world import current_engine  # noqa: E402

BAR_MIB = 2.0
RECORDED = {"FARSPAN_RECORD": "1"}  # over one rank too
NUM_NOTES = 10


def resident_mib() -> float:
    """The memory of this process that is resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def train(model: nn.Module, num_steps: int, *, is_varied: bool) -> list[float]:
    """Train, and note the resident memory after a fifth of the steps and ten times from then on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm_up = num_steps // 5
    notes: list[float] = []
    # in no order: a batch that grows needs more memory in any loop
    sizes = random.Random(0).sample(range(8, 8 + num_steps), num_steps) if is_varied else [64] * num_steps
    for number in range(num_steps):
        size = sizes[number]
        x, y = torch.randn(size, 16), torch.randint(0, 4, (size,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        loss.item()
        if number >= warm_up and (number - warm_up) % max(1, (num_steps - warm_up) // NUM_NOTES) == 0:
            notes.append(resident_mib())
    return [*notes, resident_mib()]


def worker(args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    if args.plain:
        Path(args.worker).write_text(json.dumps([train(model, args.steps, is_varied=args.varied)]))
        return
    farspan.distribute(model)
    notes = train(model, args.steps, is_varied=args.varied)
    engine = current_engine()
    assert engine is not None
    engine.side.contribute("notes", json.dumps(notes).encode())
    by_rank = [json.loads(part) for part in engine.side.gathered("notes", 60.0)]
    if engine.rank == 0:
        Path(args.worker).write_text(json.dumps(by_rank))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=5000, help="of one size; a tenth of them of ever new sizes")
    parser.add_argument("--varied", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    steps = 200 if args.quick else args.steps
    rows: list[dict[str, Any]] = []
    for is_varied in (False, True):
        for num_ranks in (0, 1, 2):
            words = ["--steps", str(steps // 10 if is_varied else steps)]
            words += ["--varied"] * is_varied + ["--plain"] * (num_ranks == 0)
            by_rank = run_ranks(__file__, max(1, num_ranks), words, environment=RECORDED, timeout_s=3600)
            grown = [max(notes) - notes[0] for notes in by_rank]
            rows.append({"sizes": "new" if is_varied else "one", "ranks": num_ranks, "grown_mib": grown})
            print(f"{rows[-1]['sizes']} sizes, {num_ranks or 'no'} ranks: + {max(grown):.2f} MiB", flush=True)
    most = max(max(row["grown_mib"]) for row in rows if row["ranks"])
    figure = f"resident memory grows by {most:.2f} MiB at most after the warm-up (bar: {BAR_MIB})"
    finish(args, rows=rows, figure=figure, holds=most <= BAR_MIB)


if __name__ == "__main__":
    main()

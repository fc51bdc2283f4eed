"""How much longer a step takes when what it has changed is saved after it: into memory, and onto the disk.

    farspan run -n 2 --max-restarts 1 cost.py RESULT      a perceptron, AdamW; turns of a few steps without saves, with
                                                          one in memory, with one on the disk, again and again

A turn ends when its last save is whole. The figures are ratios of medians over the turns of one run.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402

KINDS = ("none", "memory", "disk")
STEPS = 8
"""Of a turn, with one save in it."""
WIDTH = 1024
NUM_LAYERS = 12
BATCH = 128


def train(folder: Path, num_turns: int) -> dict[str, list[float]]:
    """Returns the seconds of each turn, by kind, and of the calls of `save`."""
    import torch
    from torch import nn

    import farspan

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(NUM_LAYERS)]
    model = farspan.distribute(nn.Sequential(*layers), measure=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(BATCH, WIDTH)
    found: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "call memory", "call disk")}
    number = 0
    for turn in range(num_turns + 1):
        for kind in KINDS:
            begun = time.perf_counter()
            saved: Any = None
            for step in range(STEPS):
                optimizer.zero_grad()
                for part in x.chunk(4):
                    (model(part).square().mean() / 4).backward()
                optimizer.step()
                number += 1
                if kind != "none" and step == 0:
                    called = time.perf_counter()
                    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": number}
                    saved = farspan.save(folder, **given, keep=1, memory=kind == "memory")
                    if turn:
                        found[f"call {kind}"].append(time.perf_counter() - called)
            if saved is not None:
                saved.wait()
            if turn:  # the first one makes memory, programs, plans
                found[kind].append(time.perf_counter() - begun)
    return found


def main() -> None:
    if "FARSPAN_RANK" in os.environ:
        folder = Path(sys.argv[1])
        found = train(folder / "checkpoints", int(sys.argv[2]))
        if os.environ["FARSPAN_RANK"] == "0":
            (folder / "result.json").write_text(json.dumps(found))
        return
    args = arguments(__doc__).parse_args()
    top = Path(tempfile.mkdtemp(dir=ROOT))  # a disk, where temporary files may lie in memory
    try:
        command = [
            sys.executable,
            "-m",
            "farspan",
            "run",
            "-n",
            "2",
            "--max-restarts",
            "1",
            "--log-dir",
            str(top / "logs"),
        ]
        variables = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        command += [__file__, str(top), "2" if args.quick else "8"]
        subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, check=True)
        found = json.loads((top / "result.json").read_text())
    finally:
        shutil.rmtree(top, ignore_errors=True)
    medians = {kind: statistics.median(times) for kind, times in found.items()}
    state = 3 * 4 * NUM_LAYERS * (WIDTH * WIDTH + WIDTH)
    figure = f"{state / 2**20:.0f} MiB in 2 ranks, saved once in {STEPS} steps of {medians['none'] / STEPS:.2f} s: "
    figure += ", ".join(
        f"{kind} {medians[kind] / medians['none']:.2f} times the time without (save returns after "
        f"{1e3 * medians[f'call {kind}']:.0f} ms)"
        for kind in KINDS[1:]
    )
    rows = [{"kind": kind, "times_s": times} for kind, times in found.items()]
    finish(args, rows=rows, figure=figure, holds=True)


if __name__ == "__main__":
    main()

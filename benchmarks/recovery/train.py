"""The program of benchmarks/exact_resume, as a script that says where it is: FOLDER PIPE STEPS PAUSE [memory]."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[2] / "src")]

from benchmarks.recovery.words import say  # noqa: E402


def main() -> None:
    folder, pipe, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rank, start = int(os.environ.get("FARSPAN_RANK", "0")), int(os.environ.get("FARSPAN_RESTART", "0"))
    say(pipe, "pid", start, rank, os.getpid())
    import torch
    from benchmarks.exact_resume.program import run

    torch.set_num_threads(1)

    def on_step(step: int) -> None:
        if rank == 0:
            say(pipe, "step", start, step, time.monotonic())
        time.sleep(float(sys.argv[4]))

    found = run(folder / "checkpoints", steps, seed=None, memory="memory" in sys.argv[5:], on_step=on_step)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

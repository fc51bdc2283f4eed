"""What the plain program's random numbers cost: the demo's step with dropout, against draws that paths seed.

The model and the sizes are those of examples/train_gpt.py, with a dropout of 0.1 after the embedding, each attention
and each perceptron, over two processes of one thread each. Steps take turns: one with the plain program's numbers, one
as under `distribute(seed=0)`, in the same run on the same model. In the second row the loop draws from torch's
generator in each micro-batch, as nanoGPT's `get_batch` does: all that the model draws has to be skipped before it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "examples")]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402

import farspan  # noqa: E402
from farspan.execute.process.world import current_engine  # noqa: E402
from gpt import GPT  # noqa: E402

BAR = 1.05
# examples/train_gpt.py's defaults
WIDTH, NUM_HEADS, NUM_BLOCKS, CONTEXT, BATCH, NUM_MICRO_BATCHES = 128, 4, 8, 64, 4, 8
DROPOUT = 0.1
PLAIN, SEEDED = None, 0


class Dropped(GPT):
    """The demo's model with a dropout wherever GPT-2 has one but inside the attention."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH, num_heads=NUM_HEADS, num_blocks=NUM_BLOCKS, context=CONTEXT)
        self.embedding = nn.Sequential(self.embedding, nn.Dropout(DROPOUT))
        blocks: Any = self.blocks
        for block in blocks:
            block.attention.project = nn.Sequential(block.attention.project, nn.Dropout(DROPOUT))
            block.mlp.append(nn.Dropout(DROPOUT))


def worker(args: argparse.Namespace) -> None:
    """One of two ranks."""
    from corpus import load_corpus, sample_windows
    from train_gpt import loss_of, parameter_groups

    torch.set_num_threads(1)
    torch.manual_seed(0)
    own = torch.Generator().manual_seed(0)
    training, _ = load_corpus(1_000_000)
    model = Dropped()
    farspan.distribute(model, measure=False)  # its first step would be another
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=3e-4)
    engine = current_engine()
    assert engine is not None

    def step(generator: Any) -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        losses: list[Tensor] = []
        for _ in range(NUM_MICRO_BATCHES):
            x, y = sample_windows(training, BATCH, CONTEXT, generator)
            loss = loss_of(model, x, y) / NUM_MICRO_BATCHES
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sum(loss.item() for loss in losses)
        return time.perf_counter() - began

    found: dict[str, list[float]] = {f"{loop} {kind}": [] for loop in ("own", "shared") for kind in ("plain", "seeded")}
    for number in range(args.warm_up + args.steps):
        for loop, generator in (("own", own), ("shared", None)):
            for kind, seed in (("plain", PLAIN), ("seeded", SEEDED))[:: 1 if number % 2 else -1]:
                engine.seed_draws(seed)
                time_s = step(generator)
                if number >= args.warm_up:
                    found[f"{loop} {kind}"].append(time_s)
    engine.side.contribute("times", json.dumps(found).encode())
    by_rank = [json.loads(part) for part in engine.side.gathered("times", 60.0)]
    if engine.rank == 0:
        Path(args.worker).write_text(json.dumps(by_rank))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=80, help="of each kind")
    parser.add_argument("--warm-up", type=int, default=5, help="steps of each kind before them")
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    steps = 15 if args.quick else args.steps
    by_rank = run_ranks(__file__, 2, ["--steps", str(steps), "--warm-up", str(args.warm_up)], timeout_s=900)
    rows: list[dict[str, Any]] = []
    for loop, text in (("own", "the demo's loop"), ("shared", "a loop that draws itself")):
        plain, seeded = ([max(times) for times in zip(*(rank[f"{loop} {kind}"] for rank in by_rank), strict=True)]
                         for kind in ("plain", "seeded"))  # fmt: skip
        ratio = median(one / other for one, other in zip(plain, seeded, strict=True))
        rows.append(
            {"loop": loop, "plain_s": median(plain), "seeded_s": median(seeded), "ratio": ratio, "steps": steps}
        )
        print(f"{text:26s} plain {median(plain) * 1e3:7.1f} ms   seeded {median(seeded) * 1e3:7.1f} ms   x {ratio:.3f}")
    finish(
        args,
        rows=rows,
        figure=f"a step with dropout {DROPOUT} takes x {rows[0]['ratio']:.3f} with the plain program's numbers, "
        f"of that with seeded paths (bar: {BAR})",
        holds=rows[0]["ratio"] <= BAR,
    )


if __name__ == "__main__":
    main()

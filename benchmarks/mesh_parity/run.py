"""Every way to make stages wide on 2, 3 and 4 ranks: the numbers of one process.

A GPT of four blocks with tied embedding and dropout, three steps of five micro-batches, clipping, AdamW. Each rank is a
process. "exact" must give the losses, norms, gradients and weights of the plain loop to the last bit; "sum" its losses,
norms and first gradients within 1e-6 of the largest of each; and each plan, run twice, the same to the last bit.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402

import farspan  # noqa: E402

BAR = 1e-6
NUM_BLOCKS, SIZE, WORDS, LENGTH = 4, 32, 50, 12
NUM_STEPS, NUM_MICRO_BATCHES = 3, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.mlp = nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.mlp(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SIZE)
        self.position = nn.Parameter(torch.randn(LENGTH, SIZE) * 0.02)
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(SIZE, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def built() -> nn.Module:
    torch.manual_seed(0)
    return GPT()


def train(model: Any) -> dict[str, list[float]]:
    """Losses, norms, all numbers of the gradients of the first step, and of the weights after the last one."""
    torch.manual_seed(1)
    words = torch.randint(WORDS, (NUM_STEPS, NUM_MICRO_BATCHES, 3, LENGTH + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: dict[str, list[float]] = {"losses": [], "norms": [], "gradients": [], "weights": []}
    for batch in words:
        optimizer.zero_grad()
        losses: list[Any] = []
        for part in batch:
            out = model(part[:, :-1])
            losses.append(F.cross_entropy(out.flatten(0, 1), part[:, 1:].flatten()) / NUM_MICRO_BATCHES)
            losses[-1].backward()
        if not found["gradients"]:
            found["gradients"] = [x for item in model.parameters() for x in item.grad.flatten().tolist()]
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        found["losses"] += [loss.item() for loss in losses]
    found["weights"] = [x for item in model.state_dict().values() for x in item.flatten().tolist()]
    return found


def widths_of(num_ranks: int) -> Iterator[tuple[int, ...]]:
    """All ways to divide ranks into a row of stages of which one at least is wide."""
    for num_cuts in range(num_ranks - 1):
        for cuts in itertools.combinations(range(1, num_ranks), num_cuts):
            ends = (0, *cuts, num_ranks)
            yield tuple(end - begin for begin, end in itertools.pairwise(ends))


def plan_of(widths: tuple[int, ...]) -> farspan.Plan:
    names = ["embed", *(f"blocks.{number}" for number in range(NUM_BLOCKS)), "head"]
    ranks = iter(range(sum(widths)))
    stages = ["+".join(f"rank:{next(ranks)}" for _ in range(width)) for width in widths]
    placement = {name: number * len(widths) // len(names) for number, name in enumerate(names)}
    return farspan.Plan(stages=tuple(stages), placement={**placement, "position": 0})


def worker(args: Any) -> None:
    torch.set_num_threads(1)
    wanted = train(built())
    rows: list[dict[str, Any]] = []
    for widths in widths_of(int(os.environ["WORLD_SIZE"])):
        for reduction in ("exact", "sum"):
            runs = [
                train(farspan.distribute(built(), plan=plan_of(widths), gradient_reduction=reduction)) for _ in range(2)
            ]
            largest = {name: max(map(abs, numbers)) for name, numbers in wanted.items()}
            off = {
                name: max(abs(a - b) for a, b in zip(runs[0][name], numbers, strict=True)) / largest[name]
                for name, numbers in wanted.items()
            }
            row = {"widths": "-".join(map(str, widths)), "reduction": reduction, "off": off}
            rows.append({**row, "is_equal": runs[0] == wanted, "repeats": runs[0] == runs[1]})
    if os.environ["RANK"] == "0":
        Path(args.worker).write_text(json.dumps(rows))


def holds(row: dict[str, Any]) -> bool:
    off = [row["off"][name] for name in ("losses", "norms", "gradients")]
    return row["repeats"] and (row["is_equal"] if row["reduction"] == "exact" else max(off) <= BAR)


def main() -> None:
    args = arguments(__doc__).parse_args()
    if args.worker:
        worker(args)
        return
    rows: list[dict[str, Any]] = []
    for num_ranks in (2,) if args.quick else (2, 3, 4):
        rows += run_ranks(__file__, num_ranks, [], timeout_s=1500)
    for row in rows:
        off = ", ".join(f"{name} {number:.1e}" for name, number in row["off"].items())
        said = "to the last bit" if row["is_equal"] else off
        print(f"{row['widths']:8} {row['reduction']:6} {said}{'' if row['repeats'] else ', OTHERWISE WHEN RUN AGAIN'}")
    exact = [row for row in rows if row["reduction"] == "exact"]
    sums = [row for row in rows if row["reduction"] == "sum"]
    largest = max(max(row["off"][name] for name in ("losses", "norms", "gradients")) for row in sums)
    finish(
        args,
        rows=rows,
        figure=f"exact: {sum(row['is_equal'] for row in exact)} of {len(exact)} plans equal to one process to the last "
        f"bit; sum: within {largest:.1e}; {sum(row['repeats'] for row in rows)} of {len(rows)} repeat",
        holds=all(map(holds, rows)),
    )


if __name__ == "__main__":
    main()

"""Every way to use 2, 3 and 4 ranks in groups, and in stages of several ranks, which take micro-batches in turn or run
each layer together: the numbers of one process.

A GPT of four blocks with tied embedding and dropout, three steps of five micro-batches, clipping, AdamW. Each rank is a
process. "exact" must give the losses, norms, gradients and weights of the plain loop to the last bit; "sum" its losses,
norms and first gradients within 1e-6 of the largest of each; and each plan, run twice, the same to the last bit.

The plain loop of k groups is one process with k copies of the model, each of which goes through the micro-batches of
its group; what their gradients are averaged to, it adds up in the order of gloo's ring (`ring_sum`).
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402

import farspan  # noqa: E402
from farspan.execute.process.world import current_engine  # noqa: E402

BAR = 1e-6
NUM_BLOCKS, SIZE, WORDS, LENGTH = 4, 32, 50, 12
NUM_STEPS, NUM_MICRO_BATCHES = 3, 5
DROPOUT = 0.1
"""Of one group; others draw masks of their own, which one process does not have."""
Found = dict[str, list[float]]


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


def built(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    model = GPT()
    for block in model.blocks:
        block.drop.p = dropout  # type: ignore[union-attr]
    return model


def words_of(group: int) -> Tensor:
    """The micro-batches of a group, by step."""
    generator = torch.Generator().manual_seed(1 + group)
    return torch.randint(WORDS, (NUM_STEPS, NUM_MICRO_BATCHES, 3, LENGTH + 1), generator=generator)


def train(model: Any, group: int) -> Iterator[Found]:
    """Losses, norms, all numbers of the gradients of the first step, and of the weights after the last one.

    Yields where the gradients of groups are averaged, and at the end.
    """
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: Found = {"losses": [], "norms": [], "gradients": [], "weights": []}
    for batch in words_of(group):
        optimizer.zero_grad()
        losses: list[Any] = []
        for part in batch:
            out = model(part[:, :-1])
            losses.append(F.cross_entropy(out.flatten(0, 1), part[:, 1:].flatten()) / NUM_MICRO_BATCHES)
            losses[-1].backward()
        yield found
        if not found["gradients"]:
            found["gradients"] = [x for item in model.parameters() for x in item.grad.flatten().tolist()]
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        found["losses"] += [loss.item() for loss in losses]
    found["weights"] = [x for item in model.state_dict().values() for x in item.flatten().tolist()]
    yield found


def ring_sum(flats: list[Tensor]) -> Tensor:
    """The sum of what k ranks have, added up as gloo's ring does.

    The tensor is k chunks of two segments each, all segments as long but for the last one. Chunk c sets out at rank
    c - 1, goes to c - 2, and so on to rank c, and each adds its own. (Of two ranks that is a + b everywhere.)
    """
    k = len(flats)
    chunk = 2 * -(-flats[0].numel() // (2 * k))
    parts = [flat.split(chunk) for flat in flats]
    sums: list[Tensor] = []
    for number in range(len(parts[0])):
        total = parts[(number - 1) % k][number]
        for step in range(2, k + 1):
            total = total + parts[(number - step) % k][number]
        sums.append(total)
    return torch.cat(sums)


def in_one_process(num_groups: int, dropout: float, owned: list[list[str]]) -> list[Found]:
    """What each group finds where one process averages the gradients of all.

    Args:
        num_groups: How many there are.
        dropout: Of the model.
        owned: By rank of a group the names of the parameters that it owns. Each rank's gradients are one bucket: the
            last parameter first, each times 1 / k, and behind them a one for each.
    """
    models = [built(dropout) for _ in range(num_groups)]
    loops = [train(model, group) for group, model in enumerate(models)]
    found: list[Found] = []
    for step in range(NUM_STEPS + 1):
        found = [next(loop) for loop in loops]
        if num_groups == 1 or step == NUM_STEPS:
            continue
        named: list[dict[str, Any]] = [dict(model.named_parameters()) for model in models]
        for names in filter(None, owned):
            last_first = names[::-1]
            ones = torch.ones(len(names))
            flats = [torch.cat([*(item[name].grad.flatten() for name in last_first), ones]) for item in named]
            mean = ring_sum([flat * (1 / num_groups) for flat in flats])
            sizes = [named[0][name].numel() for name in last_first]
            for item in named:
                for name, part in zip(last_first, mean[: sum(sizes)].split(sizes), strict=True):
                    item[name].grad = part.view_as(item[name]).clone()
    return found


def widths_of(num_ranks: int, num_groups: int) -> Iterator[tuple[int, ...]]:
    """All ways to divide the ranks of a group into a row of stages; without groups those of which one is wide."""
    size = num_ranks // num_groups
    for num_cuts in range(size - (num_groups == 1)):
        for cuts in itertools.combinations(range(1, size), num_cuts):
            ends = (0, *cuts, size)
            yield tuple(end - begin for begin, end in itertools.pairwise(ends))


def plan_of(widths: tuple[int, ...], sign: str) -> farspan.Plan:
    names = ["embed", *(f"blocks.{number}" for number in range(NUM_BLOCKS)), "head"]
    ranks = iter(range(sum(widths)))
    stages = [sign.join(f"rank:{next(ranks)}" for _ in range(width)) for width in widths]
    placement = {name: number * len(widths) // len(names) for number, name in enumerate(names)}
    return farspan.Plan(stages=tuple(stages), placement={**placement, "position": 0})


def everywhere(item: Any) -> list[Any]:
    """What each rank has given."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, item)
    return parts


def owned_here(model: nn.Module) -> list[str]:
    """The parameters of a model that this rank owns, in the order in which farspan has them."""
    engine = current_engine()
    assert engine is not None
    names = {id(item): name for name, item in model.named_parameters()}
    return [names[id(item.tensor)] for item in engine.parameters.values() if item.is_owned and id(item.tensor) in names]


def worker(args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # for the comparison
    num_groups, size = args.groups, dist.get_world_size() // args.groups
    group, dropout = dist.get_rank() // size, DROPOUT if num_groups == 1 else 0.0
    rows: list[dict[str, Any]] = []
    for widths in widths_of(dist.get_world_size(), num_groups):
        for sign, reduction in (("+", "exact"), ("+", "sum"), ("&", "sum")):
            if sign == "&" and max(widths) == 1:
                continue
            runs: list[Found] = []
            owned: list[str] = []
            for _ in range(2):
                model = farspan.distribute(
                    built(dropout), plan=plan_of(widths, sign), gradient_reduction=reduction, data_parallel=num_groups
                )
                owned = owned_here(model)
                *_, found = train(model, group)
                runs.append(found)
            wanted = in_one_process(num_groups, dropout, everywhere(owned)[:size])[group]
            largest = {name: max(map(abs, numbers)) for name, numbers in wanted.items()}
            off = {
                name: max(abs(a - b) for a, b in zip(runs[0][name], numbers, strict=True)) / largest[name]
                for name, numbers in wanted.items()
            }
            parts = everywhere((off, runs[0] == wanted, runs[0] == runs[1]))
            rows.append(
                {
                    "groups": num_groups,
                    "widths": "-".join(f"{width}{'&' * (sign == '&' and width > 1)}" for width in widths),
                    "is_tensor": sign == "&",
                    "reduction": reduction,
                    "off": {name: max(part[0][name] for part in parts) for name in off},
                    "is_equal": all(part[1] for part in parts),
                    "repeats": all(part[2] for part in parts),
                }
            )
    if dist.get_rank() == 0:
        Path(args.worker).write_text(json.dumps(rows))


def holds(row: dict[str, Any]) -> bool:
    off = [row["off"][name] for name in ("losses", "norms", "gradients")]
    return row["repeats"] and (row["is_equal"] if row["reduction"] == "exact" else max(off) <= BAR)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--groups", type=int, default=1, help="of a worker")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    rows: list[dict[str, Any]] = []
    for num_ranks in (2,) if args.quick else args.ranks:
        for num_groups in [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]:
            rows += run_ranks(__file__, num_ranks, ["--groups", str(num_groups)], timeout_s=1500)
    for row in rows:
        off = ", ".join(f"{name} {number:.1e}" for name, number in row["off"].items())
        said = "to the last bit" if row["is_equal"] else off
        shape = f"{row['groups']} x {row['widths']}" if row["groups"] > 1 else row["widths"]
        print(f"{shape:10} {row['reduction']:6} {said}{'' if row['repeats'] else ', OTHERWISE WHEN RUN AGAIN'}")
    exact = [row for row in rows if row["reduction"] == "exact"]
    sums = [row for row in rows if row["reduction"] == "sum"]
    largest = {
        is_tensor: max(
            row["off"][name]
            for row in sums
            for name in ("losses", "norms", "gradients")
            if row["is_tensor"] == is_tensor
        )
        for is_tensor in (False, True)
    }
    finish(
        args,
        rows=rows,
        figure=f"exact: {sum(row['is_equal'] for row in exact)} of {len(exact)} plans equal to one process to the last "
        f"bit; sum: within {largest[False]:.1e}; layers over several ranks: within {largest[True]:.1e}; "
        f"{sum(row['repeats'] for row in rows)} of {len(rows)} repeat",
        holds=all(map(holds, rows)),
    )


if __name__ == "__main__":
    main()

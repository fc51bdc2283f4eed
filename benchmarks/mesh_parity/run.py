"""Every way to use ranks in groups, stages, width and inside of layers: the numbers of one process.

    --part widths    2, 3 and 4 ranks: groups of stages of several ranks, which take micro-batches in turn or run each
                     layer together
    --part meshes    4 and 6 ranks: every (data, stages, tensor) whose product they are

A GPT of four blocks with tied embedding and dropout, three steps of five micro-batches, clipping, AdamW. Each rank is a
process. "exact" must give the losses, norms, gradients and weights of the plain loop to the last bit; "sum" within
1e-6, relative to each of them as a vector; and each plan, run twice, the same to the last bit.

The plain loop of k groups is one process with k copies of the model, each of which goes through the micro-batches of
its group; what their gradients are averaged to, it adds up in the order of gloo's ring (`ring_sum`).
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402
from benchmarks.mesh_parity.program import NUM_BLOCKS, Found, built, in_one_process, train  # noqa: E402
from benchmarks.vs_torch_pipelining.run import untouched_torch  # noqa: E402

import farspan  # noqa: E402
from farspan.execute.process.world import current_engine  # noqa: E402

BAR = 1e-6
DROPOUT = 0.1
"""Of one group; others draw masks of their own, which one process does not have."""
KEPT: Mapping[str, Mapping[str, Any]] = {
    "whole": {},
    "optimizer": {"shard": "optimizer"},
    "parameters": {"shard": "parameters"},
}
"""How parameters are kept in meshes: a column of the table each, with what `farspan.distribute` is given for it."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to use the ranks of a group.

    Attributes:
        name: In the table.
        widths: The ranks of each stage.
        sign: Between them: "+", they take micro-batches in turn; "&", they run each layer together.
        reduction: How gradients are added up: "exact" or "sum".
        kept: How parameters are kept.
        given: To `farspan.distribute` besides.
    """

    name: str
    widths: tuple[int, ...]
    sign: str
    reduction: str
    kept: str = "whole"
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])


def widths_of(num_ranks: int, num_groups: int) -> Iterator[Way]:
    """All ways to divide the ranks of a group into a row of stages; without groups those of which one is wide."""
    size = num_ranks // num_groups
    for num_cuts in range(size - (num_groups == 1)):
        for cuts in itertools.combinations(range(1, size), num_cuts):
            ends = (0, *cuts, size)
            widths = tuple(end - begin for begin, end in itertools.pairwise(ends))
            for sign, reduction in (("+", "exact"), ("+", "sum"), ("&", "sum")):
                if sign == "&" and max(widths) == 1:
                    continue
                row = "-".join(f"{width}{'&' * (sign == '&' and width > 1)}" for width in widths)
                yield Way(f"{num_groups} x {row}" if num_groups > 1 else row, widths, sign, reduction)


def meshes_of(num_ranks: int, num_groups: int, kept: str) -> Iterator[Way]:
    """All (stages, tensor) of the ranks of a group, with one way to keep parameters."""
    size = num_ranks // num_groups
    for num_stages in range(1, size + 1):
        if size % num_stages:
            continue
        tensor = size // num_stages
        name = f"({num_groups}, {num_stages}, {tensor})"
        yield Way(name, (tensor,) * num_stages, "&", "sum" if tensor > 1 else "exact", kept, KEPT[kept])


def plan_of(way: Way) -> farspan.Plan:
    names = ["embed", *(f"blocks.{number}" for number in range(NUM_BLOCKS)), "head"]
    ranks = iter(range(sum(way.widths)))
    stages = [way.sign.join(f"rank:{next(ranks)}" for _ in range(width)) for width in way.widths]
    placement = {name: number * len(stages) // len(names) for number, name in enumerate(names)}
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
    size_of_all = dist.get_world_size()
    is_mesh = args.part == "meshes"
    for way in meshes_of(size_of_all, num_groups, args.kept) if is_mesh else widths_of(size_of_all, num_groups):
        runs: list[Found] = []
        owned: list[str] = []
        for _ in range(2):
            model = farspan.distribute(
                built(dropout),
                plan=plan_of(way),
                gradient_reduction=way.reduction,
                data_parallel=num_groups,
                **way.given,
            )
            owned = owned_here(model)
            *_, found = train(model, group)
            runs.append(found)
        names = everywhere(owned)[:size]
        with untouched_torch():  # else what is trained beside a model would be averaged over the groups, as it is
            wanted = in_one_process(num_groups, dropout, names)[group]
        off = {name: distance(runs[0][name], numbers) for name, numbers in wanted.items()}
        parts = everywhere((off, runs[0] == wanted, runs[0] == runs[1]))
        rows.append(
            {
                "part": args.part,
                "groups": num_groups,
                "way": way.name,
                "is_tensor": way.sign == "&" and max(way.widths) > 1,
                "kept": way.kept,
                "reduction": way.reduction,
                "off": {name: max(part[0][name] for part in parts) for name in off},
                "is_equal": all(part[1] for part in parts),
                "repeats": all(part[2] for part in parts),
            }
        )
    if dist.get_rank() == 0:
        Path(args.worker).write_text(json.dumps(rows))


def distance(found: list[float], wanted: list[float]) -> float:
    """The length of the difference of two vectors, relative to that of the second one."""
    one, other = torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    return float((one - other).norm() / other.norm())


def holds(row: dict[str, Any]) -> bool:
    is_right = row["is_equal"] if row["reduction"] == "exact" else max(row["off"].values()) <= BAR
    return row["repeats"] and is_right


def show(rows: list[dict[str, Any]]) -> None:
    """A line for each way; in meshes, a column for each way to keep parameters."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        off = ", ".join(f"{name} {number:.1e}" for name, number in row["off"].items())
        said = "to the last bit" if row["is_equal"] else off
        lines.setdefault((row["way"], row["reduction"]), {})[row["kept"]] = (
            f"{said}{'' if row['repeats'] else ', OTHERWISE WHEN RUN AGAIN'}"
        )
    for (way, reduction), found in lines.items():
        columns = "   ".join(found[kept] if len(found) == 1 else f"{kept}: {found[kept]}" for kept in found)
        print(f"{way:12} {reduction:6} {columns}", flush=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--part", choices=["widths", "meshes"], help="one of the two")
    parser.add_argument("--kept", choices=list(KEPT), help="one way to keep parameters, of the groups of a mesh")
    parser.add_argument("--groups", type=int, default=1, help="of a worker")
    parser.add_argument("--ranks", type=int, nargs="+", help="how many; by default 2 3 4, and 4 6 in meshes")
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    rows: list[dict[str, Any]] = []
    for part, usual in (("widths", (2, 3, 4)), ("meshes", (4, 6))):
        if args.part not in (None, part):
            continue
        for num_ranks in (usual[:1] if part == "widths" else (2,)) if args.quick else args.ranks or usual:
            for num_groups in [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]:
                found: list[dict[str, Any]] = []
                for kept in KEPT if part == "meshes" and num_groups > 1 else ["whole"]:
                    if args.kept in (None, kept):
                        words = ["--part", part, "--groups", str(num_groups), "--kept", kept]
                        found += run_ranks(__file__, num_ranks, words, timeout_s=1500)
                show(found)
                rows += found
    exact = [row for row in rows if row["reduction"] == "exact"]
    sums = [row for row in rows if row["reduction"] == "sum"]
    largest = {
        is_tensor: max((max(row["off"].values()) for row in sums if row["is_tensor"] == is_tensor), default=0.0)
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

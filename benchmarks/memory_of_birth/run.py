"""Models built without data: the bits of ordinary construction, and the memory that each process takes.

bits    families (transformers made small, plain torch), each rank's share of 2 and of 3 made in turn in one process;
        and a part of them over as many real processes, through `distribute`
memory  a model of 2 GiB over 4 processes: what each row (rows.py) adds to a process at its peak, after all imports
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402

MIB = 1 << 20
NUM_FAMILIES, NUM_PROCESS_FAMILIES = 60, 12
SLACK_BYTES = 64 * MIB
FULL = {"width": 1024, "num_blocks": 60, "num_tokens": 32768}
QUICK = {"width": 512, "num_blocks": 20, "num_tokens": 8192}


def peak_bytes() -> int:
    """The most physical memory that this process has had since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def forget_peak() -> int:
    """What this process has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def memory_worker(file: str, row: str, sizes: dict[str, int], folder: str) -> None:
    """One rank of a row."""
    import gc

    import torch
    from benchmarks.memory_of_birth.rows import ROWS, Net, Sizes, Stand, train

    import farspan
    from farspan.execute.process.world import current_engine

    torch.manual_seed(0)
    with farspan.deferred_init():  # imports, connections, caches
        warm = Net(Sizes(width=64, num_blocks=4, num_tokens=512))
    first = Stand(
        sizes=Sizes(width=64, num_blocks=4, num_tokens=512), folder=Path(folder), model=farspan.distribute(warm)
    )
    train(first)
    del first, warm
    engine = current_engine()
    assert engine is not None
    stand = Stand(sizes=Sizes(**sizes), folder=Path(folder))
    for act in ROWS[row][:-1]:
        act(stand)
    gc.collect()
    engine.agreement.barrier("begin")
    base, began = forget_peak() - stand.held_bytes(), time.perf_counter()
    ROWS[row][-1](stand)
    own = {
        "seconds": time.perf_counter() - began,
        "peak_bytes": peak_bytes() - base,
        "shard_bytes": stand.held_bytes(),
        "tensor_bytes": max(item.numel() * item.element_size() for item in stand.model.parameters()),
    }
    by_rank = [json.loads(each) for each in engine.agreement.gather("row", json.dumps(own).encode())]
    if engine.rank == 0:
        Path(file).write_text(json.dumps(by_rank))


def save_model(sizes: dict[str, int], folder: Path) -> None:
    """Files for the rows that load, one tensor at a time in memory."""
    import torch
    from benchmarks.memory_of_birth.rows import Net, Sizes
    from safetensors.torch import save_file

    with torch.device("meta"):
        model = Net(Sizes(**sizes))
    folder.mkdir()
    weight_map: dict[str, str] = {}
    generator = torch.Generator().manual_seed(3)
    names = [name for name, _ in model.named_parameters()]
    for number in range(0, len(names), 24):
        part = names[number : number + 24]
        data = {name: torch.empty(model.get_parameter(name).shape).uniform_(generator=generator) for name in part}
        save_file(data, folder / f"part{number}.safetensors")
        weight_map.update(dict.fromkeys(part, f"part{number}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def measure_memory(sizes: dict[str, int]) -> list[dict[str, Any]]:
    """The rows of the table."""
    from benchmarks.memory_of_birth.rows import ROWS

    folder = Path(tempfile.mkdtemp(prefix="memory_of_birth"))
    rows: list[dict[str, Any]] = []
    try:
        save_model(sizes, folder / "saved")
        for row in ROWS:
            words = ["memory", row, json.dumps(sizes), str(folder)]
            ranks = run_ranks(__file__, 4, words, timeout_s=300, environment={"FARSPAN_MEASURE": "0"})
            above = max(each["peak_bytes"] - each["shard_bytes"] - each["tensor_bytes"] for each in ranks)
            rows.append({"row": row, "ranks": ranks, "above_bytes": above})
            shown = ", ".join(f"{each['peak_bytes'] / MIB:.0f} of {each['shard_bytes'] / MIB:.0f}" for each in ranks)
            tensor, seconds = ranks[0]["tensor_bytes"] / MIB, max(each["seconds"] for each in ranks)
            print(f"{row:33s} peak of shard, MiB: {shown}; one tensor {tensor:.0f}; {seconds:.1f} s", flush=True)
    finally:
        shutil.rmtree(folder)
    return rows


def family_worker(file: str, names: list[str]) -> None:
    """One rank: families through `distribute`, against ordinary construction in this process."""
    import torch
    from benchmarks.memory_of_birth.families import build, digest_of

    import farspan

    rows: list[dict[str, str]] = []
    for name in names:
        torch.manual_seed(0)
        plain = digest_of(build(name).state_dict().values())
        after = torch.get_rng_state()
        torch.manual_seed(0)
        model = farspan.distribute(lambda name=name: build(name), measure=False)
        found = digest_of(model.state_dict().values())
        differs = "" if found == plain else "bits"
        differs = differs if torch.equal(torch.get_rng_state(), after) else "generators"
        rows.append({"family": name, "differs": differs})
    if farspan.rank() == 0:
        Path(file).write_text(json.dumps(rows))


def compare_bits(num_families: int, num_over_processes: int) -> list[dict[str, Any]]:
    """The rows of families."""
    from benchmarks.memory_of_birth.families import chosen, compare

    from farspan.place.deferred import recording

    recording.LEAST_BYTES = 256  # the models are small: nearly all of each is deferred
    rows: list[dict[str, Any]] = []
    names: list[str] = []
    for name in chosen(2 * num_families):
        if len(names) == num_families:
            break
        try:
            differs = {ranks: compare(name, ranks) for ranks in (2, 3)}
        except Exception as error:
            if not _is_buildable(name):
                continue
            differs = {2: f"{type(error).__name__}: {error}".splitlines()[0]}
        names.append(name)
        rows += [{"family": name, "ranks": ranks, "differs": what} for ranks, what in differs.items()]
        if any(differs.values()):
            print(f"{name}: {differs}", flush=True)
    some = names[:: max(1, len(names) // num_over_processes)][:num_over_processes]
    for num_ranks in (2, 3):
        found = run_ranks(__file__, num_ranks, ["families", json.dumps(some)], timeout_s=300)
        rows += [{**row, "ranks": num_ranks, "over": "processes"} for row in found]
    return rows


def _is_buildable(name: str) -> bool:
    from benchmarks.memory_of_birth.families import build

    try:
        build(name)
    except Exception:
        return False
    return True


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=["bits", "memory"])
    args, rest = parser.parse_known_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if args.worker:
        if rest[0] == "memory":
            memory_worker(args.worker, rest[1], json.loads(rest[2]), rest[3])
        else:
            family_worker(args.worker, json.loads(rest[1]))
        return
    rows: list[dict[str, Any]] = []
    figures: list[str] = []
    holds = True
    if args.only != "memory":
        counts = (8, 2) if args.quick else (NUM_FAMILIES, NUM_PROCESS_FAMILIES)
        bits = compare_bits(*counts)
        wrong = [row for row in bits if row["differs"]]
        for row in wrong:
            print(row)
        num = len({row["family"] for row in bits})
        over = sum(row.get("over") == "processes" for row in bits)
        figures.append(
            f"{num} families over 2 and 3 ranks, {len(bits)} comparisons ({over} over processes), {len(wrong)} wrong"
        )
        holds = holds and not wrong and (args.quick or num >= NUM_FAMILIES)
        rows += bits
    if args.only != "bits":
        table = measure_memory(QUICK if args.quick else FULL)
        worst = max(row["above_bytes"] for row in table)
        figures.append(f"at most {worst / MIB:.1f} MiB above the shard and one tensor")
        holds = holds and worst <= SLACK_BYTES
        rows += table
    finish(args, rows=rows, figure="; ".join(figures), holds=holds)


if __name__ == "__main__":
    main()

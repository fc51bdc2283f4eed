"""What damage to a checkpoint does: to ours, and to one of torch.distributed.checkpoint (DCP).

Two ranks save step 1, then step 2, which is damaged; then it is loaded.

files     a bit of the data, of a header, of the manifest; a hole of zeros; the end cut off; the file of another step;
          no file
disk      the disk is full while a rank writes (its largest file size is limited, so that the system refuses)
ranks     a tensor that both ranks have, with other bytes on each
crash     a rank is killed before each operation of a save, one after the other; ours: before each make, create, write,
          fsync, rename, remove. DCP, which writes over the last checkpoint by default: before each open and rename

found     the load (or the save) raises, and names the file; what is loaded without strict is step 1, to the bit
silent    something loads that is not what was saved, or a save that has not written says that it has
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402

import farspan  # noqa: E402
from farspan.errors import CheckpointError  # noqa: E402
from farspan.state.format import disk  # noqa: E402

WIDTH = 96
OPERATIONS = ("make_folder", "create", "write", "fsync", "rename", "unlink")
DAMAGES = (
    "bit in the data",
    "bit in a header",
    "bit in the metadata",
    "hole",
    "cut",
    "file of another step",
    "no file",
)
LONGEST_S = 100


def build(step: int) -> nn.Module:
    """A model whose values say of which step they are."""
    generator = torch.Generator().manual_seed(step)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    with torch.no_grad():
        for item in model.parameters():
            item.copy_(torch.randn(item.shape, generator=generator))
    return model


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    return {name: item.detach() for name, item in build(step).named_parameters()}


def step_of(found: dict[str, torch.Tensor]) -> int:
    """Of which step all values are; 0 if they are not all of one."""
    for step in (1, 2):
        expected = tensors_of(step)
        if all(torch.equal(found[name], expected[name]) for name in expected):
            return step
    return 0


# Processes: forks of this one, which has no threads and no engine.


def in_ranks(num_ranks: int, act: Callable[[int], Any]) -> list[Any]:
    """Run `act(rank)` in as many processes; by rank what it gave, or how the process ended."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pids: list[int] = []
    pipes: list[int] = []
    for rank in range(num_ranks):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)})
            os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FARSPAN_FILES": "all"})
            os.environ["FARSPAN_DEADLINE"] = "30"
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            os.dup2(null, 1)
            signal.alarm(LONGEST_S)
            os.write(writing, json.dumps(act(rank)).encode())
            os.close(writing)
            sys.exit(0)
        os.close(writing)
        pids.append(pid)
        pipes.append(reading)
    found: list[Any] = []
    for pid, pipe in zip(pids, pipes, strict=True):
        with open(pipe, "rb") as stream:
            text = stream.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        found.append(json.loads(text) if text else f"ended with {code}")
    return found


# Ours.


def save_ours(folder: Path, step: int, *, kill_rank: int = -1, kill_before: int = -1, limit: int = 0) -> list[Any]:
    """Save over two ranks; one may be killed before one of its operations, or find its disk full."""

    def act(rank: int) -> str:
        model = farspan.distribute(build(step), plan={"0": 0, "1": 0, "2": 1, "3": 1})
        if rank == kill_rank:
            kill_before_operation(kill_before)
        if limit and rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            farspan.save(folder, model=model, step=step).wait()
        except CheckpointError as error:
            return str(error)
        return "saved"

    return in_ranks(2, act)


def kill_before_operation(number: int) -> None:
    left = number

    def wrapped(function: Any) -> Any:
        def called(*args: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return function(*args)

        return called

    for name in OPERATIONS:
        setattr(disk, name, wrapped(getattr(disk, name)))


def load_ours(folder: Path, damaged: str) -> str:
    """What loading step 2 does, which is damaged in the file `damaged`; "" for nothing."""

    def act(rank: int) -> str:
        model = build(0)
        before = {name: item.detach().clone() for name, item in model.named_parameters()}
        try:
            farspan.load(folder, model=model)
        except CheckpointError as error:
            if damaged not in str(error):
                return f"not named: {error}"
        else:
            step = step_of(dict(model.named_parameters()))
            return f"step {step} loaded" if step else "silent: a mixture loaded"
        if any(not torch.equal(before[name], item) for name, item in model.named_parameters()):
            return "silent: changed by a load that raised"
        farspan.load(folder, model=model, strict=False)
        step = step_of(dict(model.named_parameters()))
        return "found" if step == 1 else f"silent: step {step} without strict"

    return in_ranks(1, act)[0]


# DCP.


def save_dcp(folder: Path, step: int, *, kill_rank: int = -1, kill_before: int = -1, limit: int = 0) -> list[Any]:
    def act(rank: int) -> str:
        dist.init_process_group("gloo")
        state = dict(list(tensors_of(step).items())[rank * 4 : rank * 4 + 4])
        if rank == kill_rank:
            kill_before_event(kill_before, folder)
        if limit and rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        writer = dcp.FileSystemWriter(str(folder), thread_count=2)
        try:
            dcp.save(state, storage_writer=writer)
        except BaseException as error:
            return f"raised {type(error).__name__}"
        return "saved"

    return in_ranks(2, act)


def kill_before_event(number: int, folder: Path) -> None:
    left = number

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event in ("open", "os.rename", "os.remove") and str(args[0]).startswith(str(folder)):
            if event == "open" and not (isinstance(args[1], str) and set(args[1]) & set("wax+")):
                return
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(hook)


def load_dcp(folder: Path) -> str:
    def act(rank: int) -> str:
        found = {name: torch.zeros_like(item) for name, item in tensors_of(0).items()}
        try:
            dcp.load(found, checkpoint_id=str(folder))
        except BaseException as error:
            return f"found: {type(error).__name__}"
        step = step_of(found)
        return f"step {step} loaded" if step else "silent: wrong values loaded"

    return in_ranks(1, act)[0]


# What is done to files.


def damage(file: Path, other: Path, kind: str, chance: random.Random, data_begins: int) -> None:
    data = bytearray(file.read_bytes())
    if kind in ("bit in the data", "bit in the metadata"):
        at = chance.randrange(data_begins if kind == "bit in the data" else 0, len(data))
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "bit in a header":
        data[chance.randrange(0, data_begins)] ^= 1 << chance.randrange(8)
    elif kind == "hole":
        size = min(16384, len(data) - data_begins)
        at = chance.randrange(data_begins, len(data) - size + 1)
        data[at : at + size] = bytes(size)
    elif kind == "cut":
        del data[chance.randrange(data_begins, len(data)) :]
    elif kind == "file of another step":
        data = bytearray(other.read_bytes())
    file.write_bytes(data)
    if kind == "no file":
        file.unlink()


def file_cases(top: Path, num_each: int, chance: random.Random) -> list[dict[str, Any]]:
    ours, theirs = top / "ours", top / "theirs"
    for step in (1, 2):
        assert save_ours(ours, step) == ["saved"] * 2
        assert save_dcp(theirs / f"step-{step}", step) == ["saved"] * 2
    rows: list[dict[str, Any]] = []
    for kind in DAMAGES:
        for _ in range(num_each):
            rank = chance.randrange(2)
            copy = top / "copy"
            shutil.copytree(ours, copy)
            name = "manifest.json" if kind == "bit in the metadata" else f"rank-{rank:05}.safetensors"
            damage(copy / "step-2" / name, copy / "step-1" / name, kind, chance, 4096)
            row = {"what": kind, "ours": load_ours(copy, f"step-2/{name}")}
            shutil.rmtree(copy)
            shutil.copytree(theirs, copy)
            name = ".metadata" if kind == "bit in the metadata" else f"__{rank}_{chance.randrange(2)}.distcp"
            damage(copy / "step-2" / name, copy / "step-1" / name, kind, chance, 256)
            rows.append(row | {"dcp": load_dcp(copy / "step-2")})
            shutil.rmtree(copy)
        print(summary(rows, kind), flush=True)
    return rows


def disk_case(top: Path) -> dict[str, Any]:
    ours, theirs = top / "full", top / "full dcp"
    save_ours(ours, 1)
    limit = 40_000
    said = save_ours(ours, 2, limit=limit)
    loaded = load_ours(ours, "")
    is_found = all("could not be written" in text for text in said) and loaded == "step 1 loaded"
    saved = save_dcp(theirs, 2, limit=limit)
    theirs_loaded = load_dcp(theirs)
    is_silent = saved == ["saved"] * 2 and theirs_loaded != "step 2 loaded"
    return {
        "what": "disk full",
        "ours": "found" if is_found else f"{said} {loaded}",
        "dcp": f"silent: saved, then {theirs_loaded}" if is_silent else f"found: {saved[1]}",
    }


def rank_case(top: Path) -> dict[str, Any]:
    def ours(rank: int) -> str:
        model = farspan.distribute(build(1), plan={"0": 0, "1": 0, "2": 1, "3": 1})
        try:
            farspan.save(top / "ranks", model=model, extra={"mask": torch.full((5,), rank)}, wait=True)
        except CheckpointError as error:
            return "found" if "extra/mask" in str(error) and "ranks 0 and 1" in str(error) else str(error)
        return "silent: saved"

    def theirs(rank: int) -> str:
        dist.init_process_group("gloo")
        try:
            dcp.save({"mask": torch.full((5,), rank)}, checkpoint_id=str(top / "ranks dcp"))
        except BaseException as error:
            return f"found: {type(error).__name__}"
        return "silent: saved"

    mine = in_ranks(2, ours)
    return {
        "what": "other bytes on two ranks",
        "ours": mine[0] if mine[0] == mine[1] else str(mine),
        "dcp": in_ranks(2, theirs)[0],
    }


def crash_cases(top: Path, stride: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    ours = top / "crash"
    save_ours(ours, 1)
    for rank in (0, 1):
        for number in range(0, 200, stride):
            copy = top / "copy"
            shutil.copytree(ours, copy)
            said = save_ours(copy, 2, kill_rank=rank, kill_before=number)
            is_over = said == ["saved"] * 2
            result = load_ours(copy, "")
            again = save_ours(copy, 3)
            left = [path.name for path in copy.iterdir() if ".tmp-" in path.name]
            shutil.rmtree(copy)
            if is_over:
                break
            is_good = result in ("step 1 loaded", "step 2 loaded") and again == ["saved"] * 2 and not left
            row = {"what": f"crash of rank {rank}", "operation": number}
            rows.append(row | {"ours": "found" if is_good else f"{result} {again} {left}"})
        print(summary(rows, f"crash of rank {rank}"), flush=True)
    theirs = top / "crash dcp"
    save_dcp(theirs, 1)
    for rank in (0, 1):
        for number in range(40):
            copy = top / "copy"
            shutil.copytree(theirs, copy)
            said = save_dcp(copy, 2, kill_rank=rank, kill_before=number)
            result = load_dcp(copy)
            shutil.rmtree(copy)
            if said == ["saved"] * 2:
                break
            lost = result.startswith("found")
            rows.append({"what": f"crash of rank {rank}", "operation": number, "dcp": "lost" if lost else result})
        print(summary(rows, f"crash of rank {rank}"), flush=True)
    return rows


def summary(rows: list[dict[str, Any]], kind: str) -> str:
    chosen = [row for row in rows if row["what"] == kind]
    sides = {side: Counter(row[side] for row in chosen if side in row) for side in ("ours", "dcp")}
    return f"{kind}: " + "; ".join(
        f"{side} " + ", ".join(f"{count} x {text[:160]}" for text, count in found.most_common())
        for side, found in sides.items()
        if found
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--each", type=int, default=10, help="of each damage to files")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chance = random.Random(args.seed)
    top, process = Path(tempfile.mkdtemp()), os.getpid()
    try:
        rows = file_cases(top, 1 if args.quick else args.each, chance)
        rows += [disk_case(top), rank_case(top)]
        print(summary(rows, "disk full"), summary(rows, "other bytes on two ranks"), sep="\n", flush=True)
        rows += crash_cases(top, 8 if args.quick else 1)
    finally:
        if os.getpid() == process:
            shutil.rmtree(top, ignore_errors=True)
    ours = [row["ours"] for row in rows if "ours" in row]
    theirs = [row["dcp"] for row in rows if "dcp" in row]
    found = sum(text == "found" for text in ours)
    silent = sum("silent" in text for text in theirs)
    lost = sum(text == "lost" for text in theirs)
    figure = (
        f"{found} of {len(ours)} found and named, nothing wrong loaded, the last good one there; "
        f"DCP: {silent} of {len(theirs)} silently wrong, {lost} times no checkpoint left"
    )
    finish(args, rows=rows, figure=figure, holds=found == len(ours))


if __name__ == "__main__":
    main()

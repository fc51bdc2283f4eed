"""A model of 2 GiB over four processes, saved and loaded in the loop's own way: what rank 0 holds at most.

construct    deferred construction: each process makes a quarter
save         rank 0: torch.save(model.state_dict(), file), save_file(model.state_dict(), file)
load         every rank: model.load_state_dict(torch.load(file, mmap=True))
import       farspan ckpt import, export to safetensors and to a torch file: one process

Peaks are of the memory that is a process's own (RssAnon, sampled each 2 ms), above what it had before the model.
"""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402

NUM_RANKS = 4
NUM_LAYERS = 32
MIB = 1 << 20
SPARE_MIB = 64


def build(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS)])


def own_mib() -> float:
    """What is this process's own: no pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def peak_of(act: Callable[[], Any]) -> float:
    """The most that is this process's own while `act` runs, in MiB."""
    most, is_over = own_mib(), threading.Event()

    def sample() -> None:
        nonlocal most
        while not is_over.wait(0.002):
            most = max(most, own_mib())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        act()
    finally:
        is_over.set()
        thread.join()
    return max(most, own_mib())


def worker(file: str, folder: str, width: int) -> None:
    import farspan
    from farspan.execute.process.world import current_engine

    torch.set_num_threads(1)
    small = nn.Sequential(*[nn.Linear(2, 2) for _ in range(NUM_RANKS)])
    farspan.distribute(small, plan={str(rank): rank for rank in range(NUM_RANKS)})  # all that is loaded once
    engine = current_engine()
    assert engine is not None
    before = own_mib()
    found: dict[str, float] = {}
    made: list[nn.Module] = []

    def construct() -> None:
        with farspan.deferred_init():
            model = build(width)
        made.append(farspan.distribute(model, plan={str(n): n * NUM_RANKS // NUM_LAYERS for n in range(NUM_LAYERS)}))

    def phase(name: str, act: Callable[[], Any], *, alone: bool = False) -> None:
        engine.agreement.barrier(f"begin {name}")
        if not alone or engine.rank == 0:
            found[name] = peak_of(act) - before
        engine.agreement.barrier(f"end {name}")

    def save_safetensors() -> None:
        from safetensors.torch import save_file

        save_file(made[0].state_dict(), f"{folder}/saved.safetensors")

    phase("construct", construct)
    phase("torch.save", lambda: torch.save(made[0].state_dict(), f"{folder}/saved.pt"), alone=True)
    phase("save_file", save_safetensors, alone=True)
    phase("load", lambda: made[0].load_state_dict(torch.load(f"{folder}/saved.pt", mmap=True)))
    shared = [json.loads(part) for part in engine.agreement.gather("found", json.dumps(found).encode())]
    if engine.rank == 0:
        Path(file).write_text(json.dumps({name: max(each.get(name, 0.0) for each in shared) for name in found}))


def tool(words: list[str]) -> None:
    """One command of `farspan ckpt`; prints its peak above what it had when it began."""
    import farspan.comm.tensor_bytes
    import farspan.record.saving.files
    import farspan.state.conversion.of_torch  # noqa: F401 - what is loaded is no tensor
    from farspan.cli.main import main as command

    before = own_mib()
    codes: list[int] = []
    peak = peak_of(lambda: codes.append(command(["ckpt", *words])))
    print(json.dumps({"peak": peak - before, "code": codes[0]}))


def run_tool(*words: str) -> float:
    done = subprocess.run(
        [sys.executable, __file__, "--tool", *words], capture_output=True, text=True, check=True, timeout=300
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 0, done.stderr
    return float(found["peak"])


def main() -> None:
    if sys.argv[1:2] == ["--tool"]:
        tool(sys.argv[2:])
        return
    parser = arguments(__doc__)
    parser.add_argument("--folder", help="where the files go")
    args = parser.parse_args()
    width = 1024 if args.quick else 4096
    if args.worker:
        worker(args.worker, args.folder, width)
        return
    tensor_mib = width * width * 4 / MIB
    shard_mib = tensor_mib * NUM_LAYERS / NUM_RANKS
    with tempfile.TemporaryDirectory() as folder:
        words = ["--folder", folder, *(["--quick"] if args.quick else [])]
        found = run_ranks(__file__, NUM_RANKS, words, timeout_s=400)
        Path(folder, "plain").mkdir()
        torch.save(build(width).state_dict(), f"{folder}/plain/saved.pt")
        is_same = filecmp.cmp(f"{folder}/saved.pt", f"{folder}/plain/saved.pt", shallow=False)
        os.remove(f"{folder}/plain/saved.pt")
        tools = {
            "import": run_tool("import", f"{folder}/saved.pt", f"{folder}/ck", "--ranks", "4"),
            "export": run_tool("export", f"{folder}/ck", f"{folder}/out.safetensors"),
            "export, torch": run_tool("export", f"{folder}/ck", f"{folder}/out.pt"),
            "diff": run_tool("diff", f"{folder}/out.pt", f"{folder}/out.safetensors"),
        }
    rows: list[dict[str, Any]] = []
    for name, peak in (found | tools).items():
        bar = tensor_mib * (2 if name == "diff" else 1) + SPARE_MIB + (0 if name in tools else shard_mib)
        rows.append({"what": name, "peak_mib": peak, "bar_mib": bar})
        print(f"{name:14} {peak:8.1f} MiB (bar {bar:.0f})", flush=True)
    print(f"the file is that of one process: {is_same}")
    worst = max(row["peak_mib"] - row["bar_mib"] for row in rows)
    finish(
        args,
        rows=rows,
        figure=f"{-worst:.0f} MiB below the bars at least, files {'equal' if is_same else 'DIFFER'}",
        holds=worst <= 0 and is_same,
    )


if __name__ == "__main__":
    main()

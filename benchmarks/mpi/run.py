"""Training over MPI against training over gloo: the same bits, and how long a step takes.

Each case is two jobs: processes that find each other by a store and send by gloo (FARSPAN_SAME_HOST=0), and processes
of mpirun that give `comm=MPI.COMM_WORLD`. Parity: losses, norms and weights after three steps of three micro-batches
with dropout, clipping and AdamW, for stages, wide stages, groups and layers over two ranks. Time: all jobs are there at
once and take turns of a few steps; those whose turn it is not are stopped (SIGSTOP).

    make test-mpi                           # makes the environment
    .venv-mpi/bin/python benchmarks/mpi/run.py
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402

import farspan  # noqa: E402

BAR = 1.1
WIDE_OF_2 = {"*": "rank:0+rank:1"}
WIDE_OF_3 = {"embed": "rank:0+rank:1", "blocks.*": "rank:0+rank:1", "head": "rank:2"}
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {},
        {"plan": WIDE_OF_2},
        {"plan": WIDE_OF_2, "gradient_reduction": "sum"},
        {"data_parallel": 2},
        {"tensor_parallel": 2},
    ],
    3: [{}, {"plan": WIDE_OF_3}, {"data_parallel": 3}],
    4: [{"data_parallel": 2}, {"data_parallel": 2, "tensor_parallel": 2}],
}
TIMED: list[dict[str, Any]] = [{}, {"data_parallel": 2}]
WORDS = 64
STEPS_OF_A_TURN = 4
LIMIT_S = 600.0


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.norm(x).cumsum(1)))
        return x + self.drop(self.mlp(x))


class Net(nn.Module):
    def __init__(self, size: int, num_blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, size)
        self.blocks = nn.ModuleList([Block(size) for _ in range(num_blocks)])
        self.head = nn.Linear(size, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Loop:
    """A model and its loop."""

    def __init__(self, args: Any) -> None:
        words = json.loads(args.words)
        if "mpi" in args.over:
            from mpi4py import MPI  # pyright: ignore[reportMissingImports]

            words["comm"] = MPI.COMM_WORLD
        torch.set_num_threads(1)
        torch.manual_seed(0)
        size, num_blocks, self.shape = (256, 6, (8, 64)) if args.timed else (32, 4, (4, 16))
        is_open = not {"data_parallel", "tensor_parallel", "plan"} & {*words}
        self.model = farspan.distribute(Net(size, num_blocks), **words, measure=False if is_open else None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(farspan.data_rank())
        self.losses: list[str] = []

    def step(self, num_micro_batches: int) -> None:
        self.optimizer.zero_grad()
        loss: Any = None
        for _ in range(num_micro_batches):
            words = torch.randint(WORDS, self.shape, generator=self.generator)
            loss = F.cross_entropy(self.model(words).flatten(0, 1), words.flatten()) / num_micro_batches
            loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses += [float(loss.item()).hex(), float(norm.item()).hex()]

    def found(self) -> list[str]:
        states = self.model.state_dict().values()
        state = b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in states)
        return [*self.losses, hashlib.sha256(state).hexdigest()]


def worker(args: Any) -> None:
    """A rank of a job; it writes what it has found, or the times of each turn that it is given."""
    loop, folder = Loop(args), Path(args.worker)
    place = f"{farspan.data_rank()}-{farspan.rank()}"
    if not args.timed:
        for _ in range(3):
            loop.step(3)
        (folder / f"found-{place}").write_text(json.dumps(loop.found()))
        return
    (folder / f"pid-{place}").write_text(str(os.getpid()))
    loop.step(4)
    is_first = place == "0-0"
    with contextlib.ExitStack() as files:
        turns: Any = files.enter_context(open(folder / "turns")) if is_first else None
        times: Any = files.enter_context(open(folder / "times", "w")) if is_first else None
        for _ in range(args.turns):
            if is_first:
                turns.readline()  # the others wait for this rank in their step
            seconds: list[float] = []
            for _ in range(STEPS_OF_A_TURN):
                began = time.perf_counter()
                loop.step(4)
                seconds.append(time.perf_counter() - began)
            if is_first:
                print(json.dumps(seconds[1:]), file=times, flush=True)


class Job:
    """The processes of one case over one transport, "gloo", "near" (memory to memory) or "mpi".

    Args:
        over: Which.
        num_ranks: How many.
        words: Arguments of `distribute`.
        turns: Which it takes if it is timed.
    """

    def __init__(self, over: str, num_ranks: int, words: dict[str, Any], turns: int | None = None) -> None:
        self.over = over
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        script = [sys.executable, __file__, "--worker", str(self.folder), "--words", json.dumps(words), "--over", over]
        if turns is not None:
            script += ["--timed", "--turns", str(turns)]
            for name in ("turns", "times"):
                os.mkfifo(self.folder / name)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FARSPAN_FILES": "all"}
        self._num_ranks = num_ranks
        if over == "mpi":
            mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            if mpirun is None:
                sys.exit("there is no mpirun: make test-mpi makes .venv-mpi, whose Python runs this")
            as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
            start = [mpirun, *as_root, "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks)]
            commands = [([*start, *script], environment)]
        else:
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                port = str(listener.getsockname()[1])
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)}
            environment["FARSPAN_SAME_HOST"] = str(int(over == "near"))
            ranks = map(str, range(num_ranks))
            commands = [(script, {**environment, "RANK": rank, "LOCAL_RANK": rank}) for rank in ranks]
        self._processes = [subprocess.Popen(command, env=variables) for command, variables in commands]

    def found(self) -> dict[str, Any]:
        """What each rank has found, by group and rank, once all have ended."""
        self.end()
        return {each.name: json.loads(each.read_text()) for each in sorted(self.folder.glob("found-*"))}

    def end(self) -> None:
        codes = [process.wait(LIMIT_S) for process in self._processes]
        if any(codes):
            raise RuntimeError(f"the processes over {self.over} ended with {codes}")

    def open(self) -> None:
        """Wait until it has started, and stop it."""
        self._turns = open(self.folder / "turns", "w")  # noqa: SIM115
        self._times = open(self.folder / "times")  # noqa: SIM115
        self._signal(signal.SIGSTOP)

    def turn(self) -> list[float]:
        """Seconds of each step of a turn."""
        self._signal(signal.SIGCONT)
        print("go", file=self._turns, flush=True)
        seconds: list[float] = json.loads(self._times.readline())
        self._signal(signal.SIGSTOP)
        return seconds

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self.end()

    def _signal(self, number: int) -> None:
        pids = [int(each.read_text()) for each in self.folder.glob("pid-*")]
        assert len(pids) == self._num_ranks
        for pid in pids:
            os.kill(pid, number)


def compared(num_ranks: int, words: dict[str, Any]) -> dict[str, Any]:
    over_gloo, over_mpi = [job.found() for job in [Job(over, num_ranks, words) for over in ("gloo", "mpi")]]
    assert len(over_gloo) == num_ranks
    return {"words": words, "ranks": num_ranks, "is_equal": over_gloo == over_mpi}


def timed(num_ranks: int, words: dict[str, Any], num_turns: int) -> dict[str, Any]:
    jobs = [Job(over, num_ranks, words, num_turns) for over in ("gloo", "mpi", "near")]
    for job in jobs:
        job.open()
    seconds: dict[str, list[list[float]]] = {job.over: [] for job in jobs}
    for turn in range(num_turns):
        for job in jobs:
            seconds[job.over].append(job.turn())
        times = ", ".join(f"{name} {1e3 * statistics.median(turns[-1]):.1f} ms" for name, turns in seconds.items())
        print(f"    turn {turn + 1}: {times}", flush=True)
    for job in jobs:
        job.close()
    times = {name: statistics.median(itertools.chain(*turns)) for name, turns in seconds.items()}
    ratios = [statistics.median(m) / statistics.median(g) for m, g in zip(seconds["mpi"], seconds["gloo"], strict=True)]
    return {
        "words": words,
        "ranks": num_ranks,
        **{f"{name}_ms": round(1e3 * median, 2) for name, median in times.items()},
        "ratio": round(statistics.median(ratios), 3),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--words", help="of a rank's process")
    parser.add_argument("--over", help="of a rank's process")
    parser.add_argument("--timed", action="store_true", help="only the times")
    parser.add_argument("--turns", type=int, default=20, help=f"turns of {STEPS_OF_A_TURN} steps")
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    rows: list[dict[str, Any]] = []
    for num_ranks, cases in ({2: CASES[2][:1]} if args.quick else {} if args.timed else CASES).items():
        for words in cases:
            rows.append(row := compared(num_ranks, words))
            what = "the same bits" if row["is_equal"] else "OTHER BITS"
            print(f"{num_ranks} ranks, {words or 'stages'}: {what}", flush=True)
    for words in TIMED[:1] if args.quick else TIMED:
        rows.append(row := timed(2, words, 4 if args.quick else args.turns))
        times = f"gloo {row['gloo_ms']} ms, MPI {row['mpi_ms']} ms, memory to memory {row['near_ms']} ms"
        print(f"2 ranks, {words or 'stages'}: {times}; MPI over gloo {row['ratio']}", flush=True)
    equal = [row["is_equal"] for row in rows if "is_equal" in row]
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    figure = f"{sum(equal)} of {len(equal)} cases with gloo's bits; a step takes {', '.join(map(str, ratios))} x gloo's"
    finish(args, rows=rows, figure=figure, holds=all(equal) and max(ratios) <= BAR)


if __name__ == "__main__":
    main()

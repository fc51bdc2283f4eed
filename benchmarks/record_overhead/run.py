"""What recording costs: of a step, of a micro-batch, and as the number of ranks grows.

step      examples/train_gpt.py's model and sizes, two processes of one thread each. A stopwatch splits all the time
          of a rank between two ends of a step into parts that exclude each other (below). Recording is all that
          farspan does outside of running the calls: what the bar is about. The garbage collector counts as its.
blocks    a GPT of 32 blocks, one rank of two, nothing is ever run: time to record a micro-batch.
ranks     a GPT of 64 blocks over 2 .. 64 ranks that do not exist (a stand-in for the side channel): time to record
          a micro-batch, and to build the step's schedule and program. All worlds take turns.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import json
import pstats
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from benchmarks.common import arguments, finish, micros, run_ranks  # noqa: E402

import farspan  # noqa: E402
import farspan.execute.backward.split as split_module  # noqa: E402
import farspan.execute.step.segment as segment_module  # noqa: E402
from farspan.execute.engine import Engine  # noqa: E402
from farspan.execute.process.world import current_engine, use_engine  # noqa: E402
from farspan.execute.step.generator_states import save_generators  # noqa: E402
from farspan.program.cache import Programs  # noqa: E402
from farspan.program.options import Settings  # noqa: E402
from farspan.record.intercept import activate, install  # noqa: E402
from farspan.record.recorder import Recorder  # noqa: E402
from gpt import GPT, NUM_BYTES  # noqa: E402

STEP_BAR, BLOCKS_BAR_S, GROWTH_BAR = 0.03, 2e-3, 1.25
# examples/train_gpt.py's defaults
WIDTH, NUM_HEADS, NUM_BLOCKS, CONTEXT, BATCH, NUM_MICRO_BATCHES = 128, 4, 8, 64, 4, 8
NUM_RANKS = (2, 4, 8, 16, 32, 64)
RECORDING = ("record", "build")
OWN = ("record", "build", "gradients", "flush", "collector", "task", "transfer")
PARTS = {
    "record": "recording the micro-batches: model, loss and backward() as the loop calls them",
    "gradients": "recording what the loop does with gradients: zero_grad, clip_grad_norm_",
    "flush": "flush: digests, agreement, exchange, letting go of what has run",
    "build": "cutting the backwards, schedule, program",
    "collector": "Python's garbage collector, wherever it came",
    "task": "running: around the calls of a task (detach, modes, checks)",
    "transfer": "running: posting receives and sends (packing, handing over to gloo)",
    "compute": "running: the calls themselves, and autograd",
    "optimizer": "the optimizer's own work",
    "wait": "waiting for other ranks",
    "loop": "the loop's own: batches, scheduler",
}


# Part 1: the step.


class Stopwatch:
    """Splits a thread's time: each moment belongs to the innermost part that is open."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0)
        self.open = ["loop"]
        self.since = time.perf_counter_ns()

    def enter(self, part: str) -> None:
        now = time.perf_counter_ns()
        self.spent[self.open[-1]] += now - self.since
        self.since = now
        self.open.append(part)

    def leave(self) -> None:
        now = time.perf_counter_ns()
        self.spent[self.open.pop()] += now - self.since
        self.since = now

    def lap(self) -> dict[str, float]:
        """Seconds by part since the last lap."""
        self.enter("loop")
        self.leave()
        spent, self.spent = self.spent, dict.fromkeys(PARTS, 0)
        return {part: value / 1e9 for part, value in spent.items()}

    def around(self, owner: Any, name: str, part: str) -> None:
        """From now on all time in `owner.name` is `part`'s, but for what others claim inside."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        setattr(owner, name, timed)


def watch(engine: Any) -> Stopwatch:
    stopwatch = Stopwatch()
    gc.callbacks.append(lambda phase, _: stopwatch.enter("collector") if phase == "start" else stopwatch.leave())
    for owner, names, part in (
        (engine, ("flush",), "flush"),
        (engine.programs, ("program_of",), "build"),
        (engine.executor, ("_forward", "_backward", "_run_weights"), "task"),
        (engine.executor, ("_post", "_send"), "transfer"),
        (engine.executor, ("_wait",), "wait"),
        (engine.side, ("wait_agreed", "gathered", "request"), "wait"),
        (segment_module, ("_call_target",), "compute"),
        (torch.autograd, ("backward",), "compute"),
        (split_module.Split, ("run_first_half",), "compute"),
        (split_module.Deferred, ("run",), "compute"),
    ):
        for name in names:
            stopwatch.around(owner, name, part)
    return stopwatch


def step_worker(args: argparse.Namespace) -> None:
    """One of two ranks: train_gpt.py's loop."""
    from corpus import load_corpus, sample_windows
    from train_gpt import cosine, loss_of, parameter_groups

    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    training, _ = load_corpus(1_000_000)
    model = GPT(width=WIDTH, num_heads=NUM_HEADS, num_blocks=NUM_BLOCKS, context=CONTEXT)
    farspan.distribute(model, measure=False)  # its first step would be another
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, 10, 1000))
    engine = current_engine()
    assert engine is not None
    stopwatch = watch(engine)
    profile = cProfile.Profile() if args.profile else None
    laps: list[dict[str, float]] = []
    micro_batches: list[float] = []

    def step() -> None:
        stopwatch.enter("gradients")
        optimizer.zero_grad()
        stopwatch.leave()
        losses: list[Tensor] = []
        for _ in range(NUM_MICRO_BATCHES):
            x, y = sample_windows(training, BATCH, CONTEXT, generator)
            began = time.perf_counter()
            stopwatch.enter("record")
            loss = loss_of(model, x, y) / NUM_MICRO_BATCHES
            loss.backward()
            losses.append(loss.detach())
            stopwatch.leave()
            micro_batches.append(time.perf_counter() - began)
        stopwatch.enter("gradients")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stopwatch.leave()
        stopwatch.enter("optimizer")
        optimizer.step()
        stopwatch.leave()
        schedule.step()
        sum(loss.item() for loss in losses)

    for number in range(args.warm_up + args.steps):
        if number == args.warm_up:
            micro_batches.clear()
            stopwatch.lap()
        if profile is not None and number >= args.warm_up:
            profile.runcall(step)
        else:
            step()
        if number >= args.warm_up:
            laps.append(stopwatch.lap())
    if profile is not None:
        profile.dump_stats(f"{args.profile}.{engine.rank}")
    engine.side.contribute("laps", json.dumps({"laps": laps, "micro_batches": micro_batches}).encode())
    by_rank = [json.loads(part) for part in engine.side.gathered("laps", 60.0)]
    if engine.rank == 0:
        Path(args.worker).write_text(json.dumps(by_rank))


def measure_step(args: argparse.Namespace) -> list[dict[str, Any]]:
    words = ["--steps", str(args.steps), "--warm-up", str(args.warm_up)]
    words += ["--profile", args.profile] if args.profile else []
    by_rank = run_ranks(__file__, 2, words, timeout_s=600)
    rows: list[dict[str, Any]] = []
    for rank, measured in enumerate(by_rank):
        laps = measured["laps"]
        step_s = median(sum(lap.values()) for lap in laps)
        parts = {part: median(lap[part] for lap in laps) for part in PARTS}
        shares = sorted(sum(lap[part] for part in RECORDING) / sum(lap.values()) for lap in laps)
        rows.append(
            {
                "part": "step",
                "rank": rank,
                "step_s": step_s,
                "parts_s": parts,
                "recording": median(shares),
                "recording_p90": shares[int(0.9 * len(shares))],
                "record_micro_batch_s": median(measured["micro_batches"]),
            }
        )
    print(
        f"\nstep: {NUM_BLOCKS} blocks of width {WIDTH}, {NUM_MICRO_BATCHES} micro-batches, 2 processes, "
        f"{args.steps} steps"
    )
    for part, text in PARTS.items():
        shown = "  ".join(
            f"{micros(row['parts_s'][part]):>11} {row['parts_s'][part] / row['step_s']:6.2%}" for row in rows
        )
        print(f"  {part:9s} {shown}   {'*' if part in RECORDING else ' '} {text}")
    print("  step      " + "  ".join(f"{micros(row['step_s']):>11}       " for row in rows))
    print("  recording " + "  ".join(f"            {row['recording']:6.2%}" for row in rows) + "   the sum of *")
    own = [sum(row["parts_s"][part] for part in OWN) / row["step_s"] for row in rows]
    print(
        "  own       "
        + "  ".join(f"            {share:6.2%}" for share in own)
        + "   all that is not there in one process"
    )
    return rows


# Parts 2 and 3: nothing is run.


class NobodySide:
    """The side channel of a rank whose peers do not exist: all say what this rank says, at once."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.history = self.on_failure = self.failure = self.streams = None
        self.given: dict[str, bytes] = {}

    def serve(self, handler: Any) -> None: ...
    def start(self, step: int, digest: int, data: tuple[int, ...] = ()) -> None: ...
    def wait_agreed(self, step: int, deadline_s: float) -> None: ...
    def fail(self, *args: Any) -> None: ...

    def contribute(self, key: str, payload: bytes, *, receiver: int | None = None) -> None:
        # What rank 0 would say where this rank says nothing.
        self.given[key] = payload or (b"30.0" if key.startswith("seconds of a straggler") else save_generators())

    def gathered(self, key: str, deadline_s: float) -> list[bytes]:
        return [self.given[key]] * self.world_size

    def forget(self, key: str) -> None:
        self.given.pop(key, None)

    forget_later = forget


class World:
    """Rank `rank` of `num_ranks`, in a thread of its own, with a GPT distributed over all of them."""

    def __init__(self, rank: int, num_ranks: int, num_blocks: int) -> None:
        self.rank, self.num_ranks, self.num_blocks = rank, num_ranks, num_blocks
        self.thread = ThreadPoolExecutor(1)
        self.run(self._set_up)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.thread.submit(function, *args).result()

    def _set_up(self) -> None:
        install()
        recorder = Recorder()
        side: Any = NobodySide(self.rank, self.num_ranks)
        self.engine = Engine(recorder, side, None, seed=0, deadline_s=1.0)
        use_engine(self.engine)
        activate(recorder)
        torch.manual_seed(0)
        model = GPT(width=16, num_heads=2, num_blocks=self.num_blocks, context=CONTEXT)  # recording sees no sizes
        self.model = farspan.distribute(model, plan=self._whole_blocks())
        self.x = torch.zeros(BATCH, CONTEXT, dtype=torch.long)

    def _whole_blocks(self) -> dict[str, str]:
        """The same calls over any number of ranks: no block is cut (the automatic plan of 64 stages would)."""
        last = self.num_ranks - 1
        ends = {"embedding": "rank:0", "position": "rank:0", "norm": f"rank:{last}", "head": f"rank:{last}"}
        blocks = {
            f"blocks.{number}": f"rank:{number * self.num_ranks // self.num_blocks}"
            for number in range(self.num_blocks)
        }
        return ends | blocks

    def record(self, num_micro_batches: int) -> list[float]:
        """Seconds for each of a step's micro-batches; what was recorded is thrown away."""
        return self.run(self._record, num_micro_batches)[0]

    def _record(self, num_micro_batches: int) -> tuple[list[float], Any]:
        times: list[float] = []
        for _ in range(num_micro_batches):
            began = time.perf_counter()
            loss = F.cross_entropy(self.model(self.x).view(-1, NUM_BYTES), self.x.reshape(-1)) / num_micro_batches
            loss.backward()
            times.append(time.perf_counter() - began)
        self.engine.recorder.forget_parameter_values()
        return times, self.engine.recorder.take_pending()

    def build(self, num_micro_batches: int) -> tuple[float, float]:
        """Seconds to make the program of a step unlike those before, and of one like those before."""
        return self.run(self._build, num_micro_batches)

    def _build(self, num_micro_batches: int) -> tuple[float, float]:
        programs = Programs()
        settings = Settings(
            teams=tuple(self.engine.teams),
            rank=self.rank,
            num_ranks=self.num_ranks,
            lookahead=self.engine.lookahead,
        )
        times: list[float] = []
        for _ in range(3):
            _, graphs = self._record(num_micro_batches)
            with self.engine.executing():
                began = time.perf_counter()
                programs.program_of(graphs, settings)
                times.append(time.perf_counter() - began)
        return times[0], times[-1]


def measure_blocks(args: argparse.Namespace) -> list[dict[str, Any]]:
    world = World(0, 2, 32)
    world.record(16)
    profile = cProfile.Profile() if args.profile else None
    if profile is not None:
        world.run(profile.enable)
        world.record(100)
        world.run(profile.disable)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    times = world.record(50 if args.quick else 400)
    row = {
        "part": "blocks",
        "num_blocks": 32,
        "record_s": median(times),
        "record_p90_s": sorted(times)[int(0.9 * len(times))],
    }
    print(
        f"\nblocks: 32 blocks: {micros(row['record_s'])} to record a micro-batch "
        f"(90 % within {micros(row['record_p90_s'])})"
    )
    return [row]


def measure_ranks(args: argparse.Namespace) -> list[dict[str, Any]]:
    worlds = {(n, rank): World(rank, n, 64) for n in NUM_RANKS for rank in (0, n - 1)}
    records: dict[tuple[int, int], list[float]] = {key: [] for key in worlds}
    for world in worlds.values():
        world.record(8)
    for _ in range(4 if args.quick else 25):
        for key, world in worlds.items():
            records[key] += world.record(8)
    rows: list[dict[str, Any]] = []
    print(
        "\nranks: 64 blocks over n ranks, one stage each: record a micro-batch; "
        "make a program on rank 0 (by micro-batch),"
    )
    print("for a step unlike those before, for one like them")
    print("    n   record, rank 0   record, rank n-1   16 micro-batches: unlike         like   2n: unlike         like")
    for n in NUM_RANKS:
        found: dict[str, float] = {}
        for m in dict.fromkeys((16, 2 * n)):
            times = [worlds[n, 0].build(m) for _ in range(2 if args.quick else 5)]
            found[f"new_{m}"], found[f"again_{m}"] = (median(parts) / m for parts in zip(*times, strict=True))
        rows.append(
            {
                "part": "ranks",
                "num_ranks": n,
                "record_first_s": median(records[n, 0]),
                "record_last_s": median(records[n, n - 1]),
                "program_of_16_s": {"new": found["new_16"], "again": found["again_16"]},
                "program_of_2n_s": {"new": found[f"new_{2 * n}"], "again": found[f"again_{2 * n}"]},
            }
        )
        row = rows[-1]
        print(
            f"  {n:3d}   {micros(row['record_first_s']):>14}   {micros(row['record_last_s']):>16}"
            f"   {micros(found['new_16']):>24}   {micros(found['again_16']):>11}"
            f"   {micros(found[f'new_{2 * n}']):>10}   {micros(found[f'again_{2 * n}']):>11}"
        )
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, help="steps that are measured; 100, or 20 with --quick")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before")
    parser.add_argument("--only", choices=("step", "blocks", "ranks"), help="one part, without a verdict")
    parser.add_argument(
        "--profile", metavar="FILE", help="profile the steps into FILE.RANK, and print recording's profile"
    )
    args = parser.parse_args()
    args.steps = args.steps or (20 if args.quick else 100)
    if args.worker:
        step_worker(args)
        return
    torch.set_num_threads(1)
    parts = {"step": measure_step, "blocks": measure_blocks, "ranks": measure_ranks}
    rows = [row for name, measure in parts.items() if args.only in (None, name) for row in measure(args)]
    if args.only:
        return
    recording = max(row["recording"] for row in rows if row["part"] == "step")
    blocks_s = next(row["record_s"] for row in rows if row["part"] == "blocks")
    by_ranks = [max(row["record_first_s"], row["record_last_s"]) for row in rows if row["part"] == "ranks"]
    growth = max(by_ranks) / by_ranks[0]
    figure = (
        f"recording {recording:.2%} of the step (bar {STEP_BAR:.0%}); "
        f"{blocks_s * 1e3:.2f} ms per micro-batch of 32 blocks (bar {BLOCKS_BAR_S * 1e3:.0f} ms); "
        f"{growth:.2f} x from 2 to 64 ranks (bar {GROWTH_BAR:.2f} x)"
    )
    holds = recording < STEP_BAR and blocks_s < BLOCKS_BAR_S and growth <= GROWTH_BAR
    finish(args, rows=rows, figure=figure, holds=holds)


if __name__ == "__main__":
    main()

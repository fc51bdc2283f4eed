"""farspan against torch.distributed.pipelining's Schedule1F1B: same GPT, same split, same micro-batches, same loss.

Two processes with one thread each hold both: torch's stage and farspan's model have the same weights, see the same
batches, and take turns, a few steps each, in the order torch, farspan, farspan, torch, ... A step is zero_grad, forward
and backward of all micro-batches, and AdamW. It begins when the first rank leaves a barrier (outside the timed region)
and ends when the last rank's optimizer has ended. While torch runs, all that farspan has put into torch is taken out.
"""

from __future__ import annotations

import contextlib
import cProfile
import json
import os
import pstats
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402

import farspan  # noqa: E402
from farspan.execute.process.world import current_engine  # noqa: E402
from farspan.torch_private import raw_grad, without_modes_of  # noqa: E402
from gpt import GPT, NUM_BYTES  # noqa: E402

BAR = 1.00
WIDTH, NUM_HEADS, NUM_BLOCKS, CONTEXT = 256, 8, 8, 128
LEARNING_RATE = 3e-4
_MODULE_CALL = nn.Module.__call__


class Stage(nn.Module):
    """What one rank has of the GPT, as torch.distributed.pipelining wants it: a module with that rank's forward."""

    def __init__(self, model: GPT, rank: int) -> None:
        super().__init__()
        self.is_first = rank == 0
        half = NUM_BLOCKS // 2
        self.blocks = model.blocks[:half] if self.is_first else model.blocks[half:]
        if self.is_first:
            self.embedding, self.position = model.embedding, model.position
        else:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embedding(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.is_first else self.head(self.norm(x))


def names_here(rank: int) -> dict[str, str]:
    """Names in the stage -> names in the model."""
    half = NUM_BLOCKS // 2
    return {f"blocks.{i}.": f"blocks.{i + rank * half}." for i in range(half)}


def build() -> GPT:
    torch.manual_seed(0)
    return GPT(width=WIDTH, num_heads=NUM_HEADS, num_blocks=NUM_BLOCKS, context=CONTEXT)


class TorchSide:
    """torch.distributed.pipelining, as its documentation uses it. Gradients are not rescaled: the loss is."""

    def __init__(self, rank: int, num_micro_batches: int) -> None:
        self.rank = rank
        self.module = Stage(build(), rank)
        stage = PipelineStage(self.module, rank, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(
            stage, num_micro_batches, loss_fn=lambda out, y: loss_of(out, y) / num_micro_batches, scale_grads=False
        )
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=LEARNING_RATE)
        self.losses: list[Tensor] = []

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.losses = []
        if self.rank == 0:
            self.schedule.step(x, return_outputs=False)
        else:
            self.schedule.step(target=y, losses=self.losses, return_outputs=False)
        self.optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            for ours, theirs in names_here(self.rank).items():
                if name.startswith(ours):
                    name = theirs + name.removeprefix(ours)
                    break
            found[name] = parameter
        return found


class FarspanSide:
    """The plain loop."""

    def __init__(self, num_micro_batches: int) -> None:
        half = NUM_BLOCKS // 2
        plan = {"embedding": "rank:0", "position": "rank:0", "norm": "rank:1", "head": "rank:1"}
        plan.update({f"blocks.{i}": f"rank:{i // half}" for i in range(NUM_BLOCKS)})
        self.model = farspan.distribute(build(), plan=plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.num_micro_batches = num_micro_batches
        self.losses: list[Tensor] = []

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.losses = []
        for part_x, part_y in zip(x.chunk(self.num_micro_batches), y.chunk(self.num_micro_batches), strict=True):
            loss = loss_of(self.model(part_x), part_y) / self.num_micro_batches
            loss.backward()
            self.losses.append(loss.detach())
        self.optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        engine = current_engine()
        assert engine is not None
        mine = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return {
            mine[id(item.tensor)]: item.tensor
            for item in engine.parameters.values()
            if item.is_owned and id(item.tensor) in mine
        }


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.view(-1, NUM_BYTES), y.reshape(-1))


@contextlib.contextmanager
def untouched_torch() -> Iterator[None]:
    """torch as it was before farspan was imported: no function mode, module call, gradient property, optimizer hook."""
    engine = current_engine()
    assert engine is not None
    patched_call, grad = nn.Module.__call__, nn.Parameter.__dict__.get("grad")
    tables: Any = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    hooks = [dict(table) for table in tables]
    with without_modes_of(engine.recorder):
        nn.Module.__call__ = _MODULE_CALL  # type: ignore[method-assign]
        if grad is not None:
            del nn.Parameter.grad
        for table in tables:
            table.clear()
        try:
            yield
        finally:
            nn.Module.__call__ = patched_call  # type: ignore[method-assign]
            if grad is not None:
                nn.Parameter.grad = grad  # type: ignore[assignment]
            for table, content in zip(tables, hooks, strict=True):
                table.update(content)


def batch_of(step: int, num_micro_batches: int, batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(NUM_BYTES, (num_micro_batches * batch, CONTEXT + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def worker(args: Any) -> None:
    """One rank: both sides in turns; rank 0 writes the rows."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    rows = [measure(rank, number, args) for number in args.micro_batches]
    if rank == 0:
        Path(args.worker).write_text(json.dumps(rows))
    dist.barrier()


def measure(rank: int, num_micro_batches: int, args: Any) -> dict[str, Any]:
    ours = FarspanSide(num_micro_batches)
    with untouched_torch():
        theirs = TorchSide(rank, num_micro_batches)
    work = Comparison()
    for step in range(args.warm_up):
        x, y = batch_of(step, num_micro_batches, args.batch)
        with untouched_torch():
            theirs.step(x, y)
        ours.step(x, y)
        work.compare(rank, theirs, ours)
    profile = cProfile.Profile() if args.profile else None
    times: dict[str, list[tuple[int, int]]] = {"torch": [], "farspan": []}
    step = args.warm_up
    for turn in range(args.turns):
        batches = [batch_of(step + i, num_micro_batches, args.batch) for i in range(args.steps)]
        step += args.steps
        for name in ("torch", "farspan") if turn % 2 == 0 else ("farspan", "torch"):
            if name == "torch":
                with untouched_torch():
                    times[name] += [timed(theirs, batch) for batch in batches]
            else:
                times[name] += [timed(ours, batch, profile) for batch in batches]
    work.compare(rank, theirs, ours)
    if profile is not None:
        profile.dump_stats(f"{args.profile}.{num_micro_batches}.{rank}")
        if rank == 0:
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    everyone: list[Any] = [None, None]
    with untouched_torch():
        dist.all_gather_object(everyone, {"times": times, "work": vars(work)})
    span = {name: spans([part["times"][name] for part in everyone]) for name in times}
    per_turn = {
        name: [median(span[name][i : i + args.steps]) for i in range(0, len(span[name]), args.steps)] for name in span
    }
    ratios = [a / b for a, b in zip(per_turn["farspan"], per_turn["torch"], strict=True)]
    return {
        "num_micro_batches": num_micro_batches,
        "torch_s": median(span["torch"]),
        "farspan_s": median(span["farspan"]),
        "ratio": median(span["farspan"]) / median(span["torch"]),
        "median_of_turns": median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "ratios": ratios,
        "num_steps": len(span["torch"]),
        "is_close": all(part["work"]["is_close"] for part in everyone),
        "num_equal": sum(part["work"]["num_equal"] for part in everyone),
        "num_compared": sum(part["work"]["num_compared"] for part in everyone),
        "steps_s": span,
    }


def timed(side: TorchSide | FarspanSide, batch: tuple[Tensor, Tensor], profile: Any = None) -> tuple[int, int]:
    dist.barrier()
    began = time.perf_counter_ns()
    if profile is None:
        side.step(*batch)
    else:
        profile.runcall(side.step, *batch)
    return began, time.perf_counter_ns()


def spans(by_rank: list[list[tuple[int, int]]]) -> list[float]:
    """Seconds from the first rank's begin to the last one's end, by step: one host, so one monotonic clock."""
    return [
        (max(end for _, end in step) - min(began for began, _ in step)) / 1e9 for step in zip(*by_rank, strict=True)
    ]


class Comparison:
    """Whether both sides did the same work: losses, gradients and weights, tensor by tensor."""

    def __init__(self) -> None:
        self.is_close = True
        self.num_equal = 0
        self.num_compared = 0

    def compare(self, rank: int, theirs: TorchSide, ours: FarspanSide) -> None:
        losses = [loss.item() for loss in ours.losses]  # on both ranks alike
        with untouched_torch():  # what follows is this rank's own, and nothing farspan should record
            self._compare(rank, theirs, ours, losses)

    def _compare(self, rank: int, theirs: TorchSide, ours: FarspanSide, losses: list[float]) -> None:
        expected, found = theirs.parameters(), ours.parameters()
        if set(expected) != set(found):
            raise AssertionError(f"rank {rank} holds {sorted(found)} under farspan and {sorted(expected)} under torch")
        if rank == 1:
            for loss, other in zip(theirs.losses, losses, strict=True):
                self.note(loss.detach(), torch.tensor(other))
        for name, parameter in expected.items():
            gradient, other = raw_grad(parameter), raw_grad(found[name])
            if gradient is None or other is None:
                raise AssertionError(f"{name} has no gradient")
            self.note(gradient, other)
            self.note(parameter.detach(), found[name].detach())

    def note(self, expected: Tensor, found: Tensor) -> None:
        self.num_compared += 1
        self.num_equal += int(torch.equal(expected, found))
        self.is_close &= bool(torch.allclose(expected, found, rtol=1e-5, atol=1e-7))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, help="turns of each side; 24, or 4 with --quick")
    parser.add_argument("--steps", type=int, help="steps in a turn; 2")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each side before, compared one by one")
    parser.add_argument("--micro-batches", type=int, nargs="+", help="per step; 8 and 16, or 8 with --quick")
    parser.add_argument("--batch", type=int, default=4, help="sequences per micro-batch")
    parser.add_argument("--profile", metavar="FILE", help="profile farspan's steps into FILE.MICRO_BATCHES.RANK")
    args = parser.parse_args()
    args.turns = args.turns or (4 if args.quick else 24)
    args.steps = args.steps or 2
    args.micro_batches = args.micro_batches or ([8] if args.quick else [8, 16])
    if args.worker:
        worker(args)
        return
    words = ["--turns", str(args.turns), "--steps", str(args.steps), "--warm-up", str(args.warm_up)]
    words += ["--batch", str(args.batch), "--micro-batches", *map(str, args.micro_batches)]
    words += ["--profile", args.profile] if args.profile else []
    rows = run_ranks(__file__, 2, words, timeout_s=300 if args.quick else 1800)
    print("micro-batches   torch 1F1B      farspan   ratio (min .. median .. max of turns)   bitwise equal tensors")
    for row in rows:
        turns = f"{row['min']:.3f} .. {row['median_of_turns']:.3f} .. {row['max']:.3f}"
        print(
            f"{row['num_micro_batches']:13d} {row['torch_s'] * 1e3:9.1f} ms {row['farspan_s'] * 1e3:9.1f} ms   "
            f"{row['ratio']:.3f} ({turns})         {row['num_equal']} of {row['num_compared']}"
        )
        if not row["is_close"]:
            print("              the two sides did not compute the same")
    worst = max(rows, key=lambda row: row["ratio"])
    figure = (
        f"farspan / torch Schedule1F1B, median step time: {worst['ratio']:.3f} "
        f"(min {worst['min']:.3f}, max {worst['max']:.3f} over {args.turns} turns, "
        f"{worst['num_micro_batches']} micro-batches; bar {BAR:.2f})"
    )
    finish(args, rows=rows, figure=figure, holds=worst["ratio"] <= BAR and all(row["is_close"] for row in rows))


if __name__ == "__main__":
    main()

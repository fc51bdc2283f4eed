"""farspan's plan against plans made by hand, for real: what was predicted, and what is then measured.

Each rank is a process whose layers sleep for as long as a device of its speed would compute. farspan measures the
model on one such device of speed 1, as `farspan plan` does, and plans for the others. Then all plans take turns in
one launch: step time (all ranks leave a barrier together; the last one has ended its optimizer's step), and in a step
of its own what memory each rank has at its peak: parameters, optimizer state, and all that operations make and is not
yet freed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402
from benchmarks.planner_real.models import CASES, Case, set_speed, start_clock  # noqa: E402
from benchmarks.vs_torch_pipelining.run import spans, untouched_torch  # noqa: E402

import farspan  # noqa: E402
from farspan.cluster import Cluster, DeviceClass  # noqa: E402
from farspan.execute.process.world import current_engine  # noqa: E402
from farspan.place.measure.trial import Trial  # noqa: E402
from farspan.planner.optimize import Prediction, best_plan, predict_step  # noqa: E402
from farspan.planner.pipeline import Pipeline, PipelineStage  # noqa: E402
from farspan.profile import costed_graph  # noqa: E402
from farspan.schedule import LEAST_WEIGHT_WORK_S  # noqa: E402

OURS = "farspan"
BAR = 0.10
_BYTES_PER_S, _LATENCY_S = 3e9, 3e-5
"""Between processes of one host, as benchmarks/transport has it."""
_LEAST_SHARE = 0.01
"""Of the time: what takes less is no layer."""


class Side:
    """A model under one plan, and its plain loop."""

    def __init__(self, case: Case, args: Any, plan: farspan.Plan | None) -> None:
        self.model = farspan.distribute(case.model(args.seconds), plan="auto" if plan is None else plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.example, self.num_micro_batches = case.example(), args.micro_batches
        self.schedule, self.lookahead = ("", 0) if plan is None else (plan.schedule, plan.lookahead)

    def step(self, around_run: AbstractContextManager[object] | None = None) -> None:
        """Records a step, and runs it under a mode, which no call may be recorded under."""
        for _ in range(self.num_micro_batches):
            (loss_of(self.model(self.example)) / self.num_micro_batches).backward()
        start_clock()
        with around_run or nullcontext():
            self.optimizer.step()
        self.optimizer.zero_grad()


class Alive(TorchDispatchMode):
    """Counts the memory that operations make, and that is not yet freed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.peak_bytes = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {item.untyped_storage()._cdata for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        for item in tree_leaves(result):
            if type(item) is Tensor and not item.is_meta:
                storage = item.untyped_storage()
                if storage._cdata not in self.known and storage._cdata not in given:
                    self.known.add(storage._cdata)
                    self.num_bytes += storage.nbytes()
                    weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return result

    def free(self, key: int, num_bytes: int) -> None:
        self.known.discard(key)
        self.num_bytes -= num_bytes


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


def cluster_of(speeds: Sequence[float]) -> Cluster:
    classes = [
        DeviceClass(
            name=f"speed {speed:g}",
            kind="cpu",
            num_hosts=1,
            devices_per_host=speeds.count(speed),
            speed=speed,
            memory_bytes=2.0**30,
            within_bytes_per_s=_BYTES_PER_S,
            between_bytes_per_s=_BYTES_PER_S,
            latency_s=_LATENCY_S,
        )
        for speed in dict.fromkeys(speeds)
    ]
    return Cluster(classes=tuple(classes))


def predictions_of(case: Case, args: Any) -> dict[str, Prediction]:
    """farspan's plan, and those made by hand."""
    with Trial(num_devices=lambda: len(case.speeds)) as trial:
        side = Side(case, args, None)
        while True:
            side.step()
    profile = trial.profile()
    cluster = cluster_of(case.speeds)
    graph = costed_graph(profile, cluster)
    found = {OURS: best_plan(graph, cluster, profile.num_micro_batches).best}
    seconds = [float(node.forward_s) + float(node.backward_s) for node in graph.nodes]  # type: ignore[arg-type]
    equal = [1.0] * len(case.speeds)
    layers = [float(each >= _LEAST_SHARE * sum(seconds)) for each in seconds]
    by_hand = {
        "equal layers": (layers, equal),
        "equal parameters": ([node.parameter_bytes for node in graph.nodes], equal),
        "equal time": (seconds, equal),
        "equal time by speed": (seconds, case.speeds),
        "equal time by speed, slowest first": (seconds, case.speeds[::-1]),
    }
    for name, (weights, speeds) in by_hand.items():
        classes = case.speeds if speeds is equal else speeds
        cuts = cut(weights, speeds)
        stages = tuple(
            PipelineStage(device_class=f"speed {speed:g}", nodes=tuple(node.name for node in graph.nodes[begin:end]))
            for begin, end, speed in zip([0, *cuts], cuts, classes, strict=False)
        )
        one = predict_step(graph, cluster, Pipeline(stages=stages), profile.num_micro_batches)
        same = [label for label, each in found.items() if places_of(each) == places_of(one)]
        if same:  # it is run once
            found[f"{same[0]} = {name}"] = found.pop(same[0])
        else:
            found[name] = one
    return found


def places_of(each: Prediction) -> dict[str, str]:
    return {node: stage.where for stage in each.stages for node in stage.nodes}


def cut(weights: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Where each stage ends: none empty, the largest share of weight by speed as small as it can be."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for number, speed in enumerate(speeds):
        after: dict[int, tuple[float, list[int]]] = {}
        for begin, (load, ends) in best.items():
            for end in range(begin + 1, len(weights) - (len(speeds) - number - 1) + 1):
                most = max(load, sum(weights[begin:end]) / speed)
                if end not in after or most < after[end][0]:
                    after[end] = (most, [*ends, end])
        best = after
    return best[len(weights)][1]


def worker(args: Any) -> None:
    """One rank: all plans in turns; rank 0 writes what was measured."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    case = CASES[args.models[0]]
    set_speed(case.speeds[rank])
    plans = [farspan.Plan.from_json(text) for text in json.loads(Path(args.plans).read_text())]
    sides = [Side(case, args, plan) for plan in plans]
    engine = current_engine()
    assert engine is not None
    times: list[list[tuple[int, int]]] = [[] for _ in sides]
    runs: list[list[tuple[int, int]]] = [[] for _ in sides]
    orders: list[str] = []
    peaks: list[float] = []
    for turn in range(args.turns + 2):  # the first one warms up, the second counts memory
        for number in range(len(sides)) if turn % 2 else reversed(range(len(sides))):
            side = sides[number]
            engine.schedule, engine.lookahead = side.schedule, side.lookahead  # many models here
            engine.least_weight_work_s = LEAST_WEIGHT_WORK_S[side.schedule]
            dist.barrier()
            if turn == 1:
                alive = Alive()
                side.step(alive)
                orders.append(" ".join(f"{each.kind}{each.micro_batch}" for each in tasks_of_last_step()))
                peaks.append(alive.peak_bytes + resident_bytes(side))
                continue
            began = time.perf_counter_ns()
            side.step()
            if turn:
                times[number].append((began, time.perf_counter_ns()))
                tasks = tasks_of_last_step()
                runs[number].append((tasks[0].start_ns, tasks[-1].end_ns))
    everyone: list[Any] = [None] * len(case.speeds)
    dist.all_gather_object(everyone, {"step": times, "run": runs, "peaks": peaks, "orders": orders})
    if rank == 0:
        Path(args.worker).write_text(json.dumps(everyone))
    dist.barrier()


def tasks_of_last_step() -> list[Any]:
    engine = current_engine()
    assert engine is not None and engine.last_training_step is not None
    return [each for each in engine.last_training_step.traces if each.kind != "wait"]


def resident_bytes(side: Side) -> int:
    """Parameters that lie here, and what the optimizer keeps of them."""
    engine = current_engine()
    assert engine is not None
    own = {id(item.tensor) for item in engine.parameters.values() if item.is_owned}
    mine = [parameter for parameter in side.model.parameters() if id(parameter) in own]
    states = [item for parameter in mine for item in side.optimizer.state[parameter].values()]
    with untouched_torch():
        return sum(item.numel() * item.element_size() for item in [*mine, *states])


def measure(name: str, args: Any) -> list[dict[str, Any]]:
    case = CASES[name]
    found = predictions_of(case, args)
    with tempfile.TemporaryDirectory() as folder:
        plans = Path(folder, "plans.json")
        plans.write_text(json.dumps([each.plan.to_json() for each in found.values()]))
        words = ["--models", name, "--plans", str(plans), "--turns", str(args.turns)]
        words += ["--seconds", str(args.seconds), "--micro-batches", str(args.micro_batches)]
        parts = run_ranks(__file__, len(case.speeds), words, timeout_s=600)
    rows: list[dict[str, Any]] = []
    for number, (label, each) in enumerate(found.items()):
        for rank, part in enumerate(parts):
            check_order(name, label, rank, part["orders"][number], each)
        steps = spans([part["step"][number] for part in parts])
        runs = spans([part["run"][number] for part in parts])
        of_rank = {stage.where: stage for stage in each.stages}
        memory = [(of_rank[f"rank:{rank}"].memory_bytes, part["peaks"][number]) for rank, part in enumerate(parts)]
        rows.append(
            {
                "model": name,
                "speeds": case.speeds,
                "plan": label,
                "stages": [{"where": stage.where, "nodes": stage.nodes} for stage in each.stages],
                "predicted_s": each.step_s,
                "step_s": median(steps),
                "run_s": median(runs),
                "spread_s": (min(steps), max(steps)),
                "time_error": each.step_s / median(steps) - 1,
                "memory_bytes": memory,
                "memory_error": max((guess / seen - 1 for guess, seen in memory), key=abs),
            }
        )
    return rows


def check_order(name: str, label: str, rank: int, ran: str, each: Prediction) -> None:
    """Checks that what has been simulated is what has run."""
    schedule = each.simulation.schedule
    simulated = [schedule.tasks[index] for index in schedule.orders[rank]]
    expected = " ".join(f"{task.kind.value}{task.micro_batch}" for task in simulated)
    if expected != ran:
        print(f"{name}, {label}, rank {rank}: ran\n  {ran}\nsimulated was\n  {expected}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(CASES), help="all, or gpt with --quick")
    parser.add_argument("--turns", type=int, help="of each plan; 3, or 2 with --quick")
    parser.add_argument("--seconds", type=float, help="of a micro-batch at speed 1; 0.8, or 0.2 with --quick")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step")
    parser.add_argument("--plans", help="what a worker runs")
    args = parser.parse_args()
    torch.set_num_threads(1)  # of what is measured and of what runs
    args.models = args.models or (["gpt"] if args.quick else list(CASES))
    args.turns = args.turns or (2 if args.quick else 3)
    args.seconds = args.seconds or (0.2 if args.quick else 0.8)
    if args.worker:
        worker(args)
        return
    rows: list[dict[str, Any]] = []
    for name in args.models:
        rows += measure(name, args)
        show([row for row in rows if row["model"] == name])
    ratios = [to_best_by_hand(rows, name) for name in args.models]
    noise = median((row["spread_s"][1] - row["spread_s"][0]) / row["step_s"] for row in rows)
    time_error = max((row["time_error"] for row in rows), key=abs)
    memory_error = max((row["memory_error"] for row in rows), key=abs)
    figure = (
        f"step / best plan by hand {max(ratios):.3f} at most (bar 1.00 and noise, {100 * noise:.1f} %), "
        f"predicted step {100 * time_error:+.1f} %, "
        f"predicted memory {100 * memory_error:+.1f} % (bars {100 * BAR:.0f} %)"
    )
    holds = max(ratios) <= 1 + noise and abs(time_error) <= BAR and abs(memory_error) <= BAR
    finish(args, rows=rows, figure=figure, holds=holds)


def to_best_by_hand(rows: Sequence[dict[str, Any]], name: str) -> float:
    """Ours is 1 where it is one of those."""
    own = [row for row in rows if row["model"] == name]
    ours = next(row for row in own if row["plan"].startswith(OURS))
    others = [row["step_s"] for row in own if row is not ours]
    return max(ours["step_s"] / min(others), 1.0 if "=" in ours["plan"] else 0.0)


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{rows[0]['model']} on devices of speed {', '.join(f'{each:g}' for each in rows[0]['speeds'])}")
    print(f"  {'plan':45s}  predicted     step   (tasks)   error   peak memory by rank, KiB: predicted / measured")
    for row in rows:
        memory = "  ".join(f"{guess / 1024:.0f} / {seen / 1024:.0f}" for guess, seen in row["memory_bytes"])
        print(
            f"  {row['plan']:45s}  {row['predicted_s']:7.3f} s  {row['step_s']:.3f} s  {row['run_s']:.3f} s  "
            f"{100 * row['time_error']:+5.1f} %  {memory}  ({100 * row['memory_error']:+.1f} %)",
            flush=True,
        )


if __name__ == "__main__":
    main()

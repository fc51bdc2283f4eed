"""Seconds and memory of the planner: 2,000 nodes, and a wide graph, on 6 devices; 96 blocks on 1,024 of 4 classes."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import arguments, finish
from benchmarks.planner_placement.placement import place

from farspan.cluster import Cluster, DeviceClass
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode, NodeOption
from farspan.planner.partition_dp.stages import Rules
from farspan.planner.pipeline import plan_pipeline

SECONDS_BAR, MEMORY_BAR = 30.0, 2**30
CONTIGUOUS_SECONDS, FREE_SECONDS = 25.0, 15.0
CASES = ("nodes contiguous", "wide contiguous", "nodes free", "blocks bottleneck", "blocks step-time")


def main() -> None:
    parser = arguments(__doc__)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    rows: list[dict[str, Any]] = []
    for case in CASES[:1] + CASES[3:4] if args.quick else CASES:  # each in a process of its own, for its memory
        done = subprocess.run(
            [sys.executable, __file__, "--worker", case], check=True, capture_output=True, text=True, timeout=600
        )
        row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        print(
            f"{row['case']:20} value {row['value']:.4g} s, bound {row['bound']:.4g} s, {row['stages']} stages, "
            f"{row['seconds']:.1f} s ({row['cpu_seconds']:.1f} s of processor), {row['peak_bytes'] / 2**20:.0f} MiB",
            flush=True,
        )
    seconds, peak = max(row["cpu_seconds"] for row in rows), max(row["peak_bytes"] for row in rows)
    memory = f"{peak / 2**20:.0f} MiB (bar {MEMORY_BAR / 2**20:.0f} MiB)"
    figure = f"{seconds:.1f} s of processor (bar {SECONDS_BAR:.0f} s), {memory}"
    finish(args, rows=rows, figure=figure, holds=seconds < SECONDS_BAR and peak < MEMORY_BAR)


def worker(args: argparse.Namespace) -> None:
    what, _, how = args.worker.partition(" ")
    began = time.perf_counter()
    if what in ("nodes", "wide"):
        graph = branched_graph(2_000) if what == "nodes" else wide_graph(4, 14, chain=40)
        seconds = CONTIGUOUS_SECONDS if how == "contiguous" else FREE_SECONDS
        plan: Any = place(graph, six_devices(), contiguous=how == "contiguous", seconds=seconds)
        stages = len(plan.devices)
    else:
        objective: Any = how
        plan = plan_pipeline(transformer(96), four_classes(), rules=Rules(micro_batches=1_024), objective=objective)
        stages = len(plan.stages)
    row = {
        "case": args.worker,
        "value": plan.value,
        "bound": plan.bound,
        "stages": stages,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time(),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(row))


def branched_graph(num_nodes: int) -> CostedGraph:
    """Blocks of a chain and a second branch, with skips: a graph with far too many prefixes to look at all."""
    rng = random.Random(0)
    nodes = [
        CostedNode(
            name=f"n{i}",
            forward_s=rng.uniform(0, 1e-3),
            backward_s=rng.uniform(0, 2e-3),
            memory_bytes=rng.uniform(0, 2e7),
        )
        for i in range(num_nodes)
    ]
    sizes = [rng.choice((1e5, 1e6, 1e7)) for _ in nodes]
    ends = {(i, i + 1) for i in range(num_nodes - 1) if i % 10 != 3}
    for i in range(0, num_nodes - 10, 10):
        ends |= {(i, i + 4), (i + 3, i + 7), (i + 1, i + 9)}
    ends |= {(i, min(i + rng.randrange(2, 200), num_nodes - 1)) for i in range(0, num_nodes - 2, 25)}
    edges = [CostedEdge(source=f"n{a}", target=f"n{b}", size_bytes=sizes[a]) for a, b in sorted(ends) if a != b]
    return CostedGraph(nodes=tuple(nodes), edges=tuple(edges))


def wide_graph(branches: int, length: int, *, chain: int) -> CostedGraph:
    """A chain, then branches side by side, then one node: nearly (length + 1) ** branches prefixes."""
    rng = random.Random(0)
    rows = [[f"{branch}.{place}" for place in range(length)] for branch in range(branches)]
    names = [*(f"chain.{place}" for place in range(chain)), *itertools.chain(*rows), "last"]
    nodes = [
        CostedNode(
            name=name,
            forward_s=rng.uniform(0, 1e-3),
            backward_s=rng.uniform(0, 2e-3),
            memory_bytes=rng.uniform(0, 2e7),
        )
        for name in names
    ]
    sizes = {name: rng.choice((1e5, 1e6, 1e7)) for name in names}
    pairs = list(itertools.pairwise(names[:chain]))
    pairs += itertools.chain(*(itertools.pairwise((names[chain - 1], *row, "last")) for row in rows))
    edges = [CostedEdge(source=a, target=b, size_bytes=sizes[a]) for a, b in pairs]
    return CostedGraph(nodes=tuple(nodes), edges=tuple(edges))


def six_devices() -> Cluster:
    fast = DeviceClass(
        name="fast",
        kind="gpu",
        devices_per_host=4,
        memory_bytes=8e9,
        speed=2.0,
        within_bytes_per_s=20e9,
        between_bytes_per_s=10e9,
    )
    slow = DeviceClass(
        name="slow", kind="gpu", devices_per_host=2, memory_bytes=6e9, within_bytes_per_s=10e9, between_bytes_per_s=10e9
    )
    return Cluster(classes=(fast, slow))


def transformer(num_blocks: int) -> CostedGraph:
    """Blocks of 200 M parameters with tensor-parallel degrees 1 to 8, with and without remat."""

    def way(seconds: float, saved: float, parameters: float, degree: int, *, remat: bool) -> dict[str, Any]:
        slower = 1.0 if degree == 1 else 1.1
        return {
            "forward_s": slower * seconds / degree,
            "backward_s": slower * (3 if remat else 2) * seconds / degree,
            "parameter_bytes": 2 * parameters / degree,
            "saved_bytes": (saved / 20 if remat else saved) / degree,
            "memory_bytes": 16 * parameters / degree,
        }

    def node(name: str, seconds: float, saved: float, parameters: float) -> CostedNode:
        options = [
            NodeOption(
                name="remat" if remat else "plain",
                tensor_parallel=degree,
                **way(seconds, saved, parameters, degree, remat=remat),
            )
            for degree in (1, 2, 4, 8)
            for remat in (False, True)
            if (degree, remat) != (1, False)
        ]
        return CostedNode(name=name, options=tuple(options), **way(seconds, saved, parameters, 1, remat=False))

    nodes = [node("embedding", 1e-4, 3e7, 1e8)]
    nodes += [node(f"blocks.{i}", 1e-3, 6e8, 2e8) for i in range(num_blocks)]
    nodes += [node("head", 5e-4, 2e8, 1e8)]
    edges = [CostedEdge(source=a.name, target=b.name, size_bytes=3e7) for a, b in itertools.pairwise(nodes)]
    return CostedGraph(nodes=tuple(nodes), edges=tuple(edges))


def four_classes() -> Cluster:
    """256 devices each, of 80, 40, 32 and 24 GB."""
    return Cluster(
        classes=tuple(
            DeviceClass(
                name=name,
                kind=name,
                num_hosts=32,
                devices_per_host=8,
                memory_bytes=memory * 1e9,
                speed=speed,
                within_bytes_per_s=300e9,
                between_bytes_per_s=25e9,
            )
            for name, memory, speed in (("a", 80, 2.0), ("b", 40, 1.5), ("c", 32, 1.0), ("d", 24, 0.8))
        )
    )


if __name__ == "__main__":
    main()

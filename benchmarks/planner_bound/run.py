"""How far the plan that is found may be from the best one: its step against the bound that no plan is below."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import arguments, finish  # noqa: E402

from farspan.cluster import Cluster, DeviceClass  # noqa: E402
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode, NodeOption  # noqa: E402
from farspan.planner.optimize import best_plan  # noqa: E402

BARS = {"gpt-2 medium": 0.05, "100 nodes": 0.15}
SEQUENCES, LENGTH = 4, 1024
FLOPS = 10e12
"""Of a device of speed 1, in a second."""


def main() -> None:
    args = arguments(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    print("case                                      step       bound      gap   processor")
    for name, case, graph, cluster, num_micro_batches in cases(args.quick):
        began = time.process_time()
        result = best_plan(graph, cluster, num_micro_batches)
        row = {
            "name": name,
            "case": case,
            "step_s": result.best.step_s,
            "bound_s": result.bound,
            "gap": result.gap,
            "processor_s": time.process_time() - began,
        }
        rows.append(row)
        print(
            f"{name + ', ' + case:38s}  {row['step_s']:7.4f} s  {row['bound_s']:7.4f} s  {100 * row['gap']:5.1f} %  "
            f"{row['processor_s']:6.1f} s",
            flush=True,
        )
    worst = {name: max(row["gap"] for row in rows if row["name"] == name) for name in {row["name"] for row in rows}}
    figure = ", ".join(
        f"{name} {100 * worst[name]:.1f} % (bar {100 * bar:.0f} %)" for name, bar in BARS.items() if name in worst
    )
    holds = all(worst[name] <= bar for name, bar in BARS.items() if name in worst)
    finish(args, rows=rows, figure=f"gap at most: {figure}", holds=holds)


def cases(is_quick: bool) -> Iterator[tuple[str, str, CostedGraph, Cluster, int]]:
    for num_micro_batches in (4, 8, 16):
        for bandwidth in (1e9, 1e10):
            case = f"{num_micro_batches} x, {bandwidth / 1e9:g} GB/s"
            yield "gpt-2 medium", case, gpt2_medium(), three_devices(bandwidth), num_micro_batches
    for num_micro_batches in () if is_quick else (64, 256):
        yield "100 nodes", f"{num_micro_batches} x", unlike_nodes(), many_devices(), num_micro_batches


def gpt2_medium() -> CostedGraph:
    """24 blocks of width 1024, by their numbers of parameters; 34 bytes saved for each token and channel of a block."""
    width, vocabulary = 1024, 50257
    tokens = SEQUENCES * LENGTH

    def node(name: str, weights: int, saved_bytes: float, *, can_remat: bool = False) -> CostedNode:
        seconds = 2 * weights * tokens / FLOPS
        remat = NodeOption(
            name="remat",
            forward_s=seconds,
            backward_s=3 * seconds,
            memory_bytes=16.0 * weights,
            saved_bytes=2.0 * tokens * width,
        )
        return CostedNode(
            name=name,
            forward_s=seconds,
            backward_s=2 * seconds,
            weight_s=seconds,
            weight_flops=2.0 * weights * tokens,
            parameter_bytes=4.0 * weights,
            memory_bytes=16.0 * weights,
            saved_bytes=saved_bytes,
            options=(remat,) if can_remat else (),
        )

    embedding = CostedNode(
        name="embed",
        forward_s=1e-4,
        backward_s=2e-4,
        parameter_bytes=4.0 * vocabulary * width,
        memory_bytes=16.0 * vocabulary * width,
        saved_bytes=2.0 * tokens * width,
    )
    blocks = [node(f"blocks.{i}", 12 * width**2, 34.0 * tokens * width, can_remat=True) for i in range(24)]
    head = node("head", vocabulary * width, 4.0 * tokens * vocabulary)
    return chain([embedding, *blocks, head], 4.0 * tokens * width)


def three_devices(bandwidth: float) -> Cluster:
    sizes = zip("abc", (2.0, 1.5, 1.0), (40, 24, 16), strict=True)
    return Cluster(
        classes=tuple(
            DeviceClass(name=name, kind=name, memory_bytes=memory * 2**30, speed=speed, between_bytes_per_s=bandwidth)
            for name, speed, memory in sizes
        )
    )


def unlike_nodes() -> CostedGraph:
    """100 nodes in a chain, of 0.5 to 1.5 ms forward."""
    draws = random.Random(1)
    nodes = [
        CostedNode(
            name=f"n{i}",
            forward_s=seconds,
            backward_s=2 * seconds,
            weight_s=seconds,
            weight_flops=1e13,
            parameter_bytes=1e7,
            memory_bytes=1e8,
            saved_bytes=1e7,
        )
        for i, seconds in enumerate(draws.uniform(0.5e-3, 1.5e-3) for _ in range(100))
    ]
    return chain(nodes, 1e6)


def many_devices() -> Cluster:
    """64 of 4 classes, each on two hosts."""
    return Cluster(
        classes=tuple(
            DeviceClass(
                name=name,
                kind=name,
                num_hosts=2,
                devices_per_host=8,
                memory_bytes=16e9,
                speed=speed,
                within_bytes_per_s=1e11,
                between_bytes_per_s=1e10,
            )
            for name, speed in zip("abcd", (1.0, 1.5, 2.0, 3.0), strict=True)
        )
    )


def chain(nodes: list[CostedNode], size_bytes: float) -> CostedGraph:
    edges = (CostedEdge(source=a.name, target=b.name, size_bytes=size_bytes, is_saved=True) for a, b in pairwise(nodes))
    return CostedGraph(nodes=tuple(nodes), edges=tuple(edges))


if __name__ == "__main__":
    main()

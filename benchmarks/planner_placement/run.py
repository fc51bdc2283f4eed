"""The planner's placements against the public workloads of dnn-partitioning, PipeDream and Piper.

The data is read from BENCHMARK_DATA or ../shared/data; see README.md.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]

import dnn_partitioning  # noqa: E402
import pipedream  # noqa: E402
import piper  # noqa: E402
from benchmarks.common import arguments, data_folder, finish  # noqa: E402
from benchmarks.planner_placement.placement import Placement, place  # noqa: E402

from farspan.errors import PlanError  # noqa: E402
from farspan.planner.pipeline import plan_pipeline  # noqa: E402

CONTIGUOUS_BAR, FREE_BAR, AUTHORS_BAR = 1.001, 1.02, 1.0
PIPER_BANDWIDTH = 25 * 2.0**30
_ROUNDING = 1e-5  # of the figures in the reference files


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("dnn-partitioning", "pipedream", "piper"), help="one family")
    parser.add_argument("--match", default="", help="only instances with this in their name")
    args = parser.parse_args()
    families = {"dnn-partitioning": dnn_rows, "pipedream": pipedream_rows, "piper": piper_rows}
    rows: list[dict[str, Any]] = []
    heads = ("ours", "reference", "ratio", "bar", "bound", "gap", "seconds")
    widths = (12, 12, 8, 6, 12, 6, 8)
    print(" ".join([f"{'instance':44}", *(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))]))
    for family, make in families.items():
        if args.only in (None, family):
            for row in make(args):
                rows.append(row)
                show(row)
    with_reference = [row for row in rows if row["reference"] is not None]
    missed = [row for row in with_reference if not row["holds"]]
    figure = f"{len(with_reference) - len(missed)} of {len(with_reference)} instances within their bars"
    finish(args, rows=rows, figure=figure, holds=not missed and bool(with_reference))


def dnn_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Both kinds of placement of each workload; loads by the neutral evaluator that lies beside the data."""
    folder = data_folder() / "dnn-partitioning"
    evaluator = _module(folder / "evaluate.py")
    contiguous = {_file(row): row for row in _table(folder / "reference_contiguous.csv")}
    free = {_file(row): row for row in _table(folder / "reference_noncontiguous.csv")}
    for path in sorted(folder.glob("*.json")):
        if args.match not in path.name:
            continue
        data = json.loads(path.read_text())
        graph, cluster = dnn_partitioning.read_workload(path)
        for kind, references, column, bar in (
            ("contiguous", contiguous, "optimal_contiguous_maxload", CONTIGUOUS_BAR),
            ("free", free, "noncontig_best", FREE_BAR),
        ):
            plan = place(
                graph,
                cluster,
                contiguous=kind == "contiguous",
                seconds=5.0 if args.quick else 20.0,
                without_transfers={dnn_partitioning.CPU},
            )
            ours = float(evaluator.maxload(data, *_sets(plan)))
            assert math.isclose(ours, plan.value, rel_tol=1e-9), f"{path.name}: {plan.value} is {ours}"
            known = references.get(path.name)
            reference = float(known[column]) if known else None
            is_optimum = kind == "contiguous" or (known is not None and known["status"].startswith("PROVEN"))
            yield _row(f"{path.stem} {kind}", ours, reference, bar, plan.bound, plan.search_s, is_optimum)


def pipedream_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each row of the authors' optimizer, and the clusters of that table for profiles that it does not have."""
    folder = data_folder() / "pipedream"
    table = _table(folder / "reference_optimizer.csv")
    clusters = {(row["cluster"], row["straight_only"]): row for row in table}
    profiles = {path.name.split(".")[0]: pipedream.read_profile(path) for path in sorted(folder.glob("*.graph.txt"))}
    known = {(row["model"], row["cluster"], row["straight_only"]): row for row in table}
    for model, profile in profiles.items():
        for (cluster, straight), like in clusters.items():
            name = f"{model} {cluster}{' straight' if straight == 'True' else ''}"
            if args.match not in name or (
                args.quick and ("B_2x8" in cluster or (model, cluster, straight) not in known)
            ):
                continue
            began = time.perf_counter()
            ours = pipedream.best_time(
                profile,
                json.loads(like["machines_per_level"]),
                json.loads(like["bandwidth_Bps_per_level"]),
                straight=straight == "True",
            )
            row = known.get((model, cluster, straight))
            # One level over all states: the search is exact. Nested levels are exact in the authors' own nesting.
            reference = float(row["best_stage_time_s"]) if row else None
            yield _row(name, ours, reference, AUTHORS_BAR + 1e-9, ours, time.perf_counter() - began, is_optimum=False)


def piper_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each row of the authors' planner; the time per sample of our plan is computed from the file."""
    folder = data_folder() / "piper"
    for row in _table(folder / "reference.csv"):
        memory, devices = float(row["mem_GB_GiB"]) * 2**30, int(row["devices"])
        name = f"{row['workload']} {row['mem_GB_GiB']} GiB x {devices}"
        if args.match not in name or (args.quick and devices > 8):
            continue
        path = folder / row["workload"]
        given: dict[str, Any] = {"memory_bytes": memory, "num_devices": devices, "bandwidth": PIPER_BANDWIDTH}
        graph, cluster, rules = piper.read_instance(path, **given)
        is_possible = row["piper_best_TPS"] != "INFEASIBLE"  # to the authors' planner
        try:
            plan = plan_pipeline(graph, cluster, rules=rules, objective="bottleneck")
        except PlanError:
            if is_possible:
                raise
            print(f"{name:44}      nothing fits, as the authors' planner says", flush=True)
            continue
        ours = piper.evaluate(path, plan, **given)
        assert math.isclose(ours, plan.value, rel_tol=1e-9), f"{name}: {plan.value} is {ours}"
        reference = float(row["piper_best_TPS"]) if is_possible else None
        rounding = 0.0005 if row["workload"] == "resnet.json" else 1e-8  # of the table
        bar = AUTHORS_BAR + (rounding / reference if reference else 0.0)
        yield _row(name, ours, reference, bar, plan.bound, plan.search_s, is_optimum=False)


def _row(
    name: str, ours: float, reference: float | None, bar: float, bound: float, seconds: float, is_optimum: bool
) -> dict[str, Any]:
    holds = reference is None or ours <= reference * bar
    if reference is not None and is_optimum:
        holds = holds and bound <= reference * (1 + _ROUNDING)
    return {
        "instance": name,
        "ours": ours,
        "reference": reference,
        "ratio": None if reference is None else ours / reference,
        "bar": bar,
        "bound": bound,
        "reference_is_optimum": is_optimum,
        "seconds": seconds,
        "holds": holds,
    }


def show(row: dict[str, Any]) -> None:
    reference = "" if row["reference"] is None else f"{row['reference']:12.5g}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:8.4f}"
    gap = 1 - row["bound"] / row["ours"] if row["ours"] else 0.0
    print(
        f"{row['instance']:44} {row['ours']:12.5g} {reference:>12} {ratio:>8} {row['bar']:6.3f} {row['bound']:12.5g}"
        f" {gap:6.1%} {row['seconds']:8.1f}{'' if row['holds'] else '  MISSED'}",
        flush=True,
    )


def _sets(plan: Placement) -> tuple[list[list[int]], list[list[int]]]:
    """Node numbers by accelerator, and by CPU."""
    accelerators = [[int(name) for name in each.nodes] for each in plan.devices if each.device_class == "accelerator"]
    cpus = [[int(name) for name in each.nodes] for each in plan.devices if each.device_class == "cpu"]
    return accelerators, cpus


def _file(row: dict[str, str]) -> str:
    return f"{'op' if row['granularity'] == 'OperatorGraphs' else 'layer'}_{row['workload']}.json"


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("evaluate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()

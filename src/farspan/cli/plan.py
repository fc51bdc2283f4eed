"""`farspan plan`: where to run what, for a graph with costs (docs/planner-graph.md) and a cluster; nothing is run."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farspan.planner.pipeline import Pipeline
    from farspan.planner.placement import Placement

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Adds the parser of `farspan plan` to those of the other commands."""
    parser = commands.add_parser(
        "plan",
        help="find out where to run what, before anything is run",
        description="Finds a plan for a graph with costs on a cluster, and says how far from the best it can be.",
        allow_abbrev=False,
    )
    parser.add_argument("--graph", required=True, metavar="FILE", help="graph with costs (JSON)")
    parser.add_argument("--cluster", required=True, metavar="FILE", help="hosts, devices and links (TOML)")
    parser.add_argument(
        "--objective",
        choices=("step-time", "max-load"),
        default="step-time",
        help="seconds of a step of a pipeline (default), or the load of the busiest device",
    )
    parser.add_argument("--contiguous", action="store_true", help="max-load: no data flows back to an earlier stage")
    parser.add_argument(
        "--micro-batches", type=int, default=None, metavar="M", help="step-time: micro-batches of a step (default: 8)"
    )
    parser.add_argument(
        "--seconds", type=float, default=None, metavar="S", help="max-load: about how long to search (default: 20)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from farspan.cluster import read_cluster
    from farspan.planner.costed import read_graph

    _check(arguments)
    graph, cluster = read_graph(arguments.graph), read_cluster(arguments.cluster)
    if arguments.objective == "max-load":
        from farspan.planner.placement import place

        seconds = 20.0 if arguments.seconds is None else arguments.seconds
        placement = place(graph, cluster, contiguous=arguments.contiguous, seconds=seconds)
        print(json.dumps(_placement_members(placement)) if arguments.json else _placement_text(placement))
        return 0
    from farspan.planner.pipeline import plan_pipeline
    from farspan.planner.search.stages import Rules

    num_micro_batches = 8 if arguments.micro_batches is None else arguments.micro_batches
    pipeline = plan_pipeline(graph, cluster, rules=Rules(micro_batches=num_micro_batches))
    print(json.dumps(_pipeline_members(pipeline)) if arguments.json else _pipeline_text(pipeline))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    from farspan.errors import PlanError

    for option, value, objective in (
        ("--contiguous", arguments.contiguous or None, "max-load"),
        ("--seconds", arguments.seconds, "max-load"),
        ("--micro-batches", arguments.micro_batches, "step-time"),
    ):
        if value is not None and arguments.objective != objective:
            raise PlanError(
                f"{option} has no effect on the objective {arguments.objective}.",
                why=f"it belongs to the objective {objective}.",
                hint=f"--objective {objective}",
            )
        if value is not None and value <= 0:
            raise PlanError(f"{option} is {value}.", why="it is a number above 0.", hint=f"{option} 8")


def _members(objective: str, result: Placement | Pipeline) -> dict[str, Any]:
    return {
        "format": "farspan-search/1",
        "objective": objective,
        "value_s": result.value,
        "lower_bound_s": result.bound,
        "gap": result.gap,
        "search_s": result.search_s,
    }


def _placement_members(placement: Placement) -> dict[str, Any]:
    devices = [
        {
            "class": each.device_class,
            "index": each.index,
            "load_s": each.load_s,
            "memory_bytes": each.memory_bytes,
            "nodes": list(each.nodes),
        }
        for each in placement.devices
    ]
    return {**_members("max-load", placement), "contiguous": placement.is_contiguous, "plan": {"devices": devices}}


def _pipeline_members(pipeline: Pipeline) -> dict[str, Any]:
    stages = [
        {
            "class": stage.device_class,
            "replicas": stage.replicas,
            "tensor_parallel": stage.tensor_parallel,
            "once_s": stage.once_s,
            "rate_s": stage.rate_s,
            "memory_bytes": stage.memory_bytes,
            "in_flight": stage.in_flight,
            "nodes": list(stage.nodes),
            "options": stage.options,
        }
        for stage in pipeline.stages
    ]
    return {**_members(pipeline.objective, pipeline), "plan": {"stages": stages}}


def _placement_text(placement: Placement) -> str:
    from farspan.units import format_bytes, format_seconds

    rows = [
        (
            f"{each.device_class}:{each.index}",
            str(len(each.nodes)),
            format_seconds(each.load_s),
            f"{each.load_s / placement.value:.0%}" if placement.value else "-",
            format_bytes(each.memory_bytes),
            _span(each.nodes),
        )
        for each in placement.devices
    ]
    table = _table(("device", "nodes", "load", "busy", "memory", "from .. to"), rows)
    return f"{table}\n{_verdict('busiest device', placement)}"


def _pipeline_text(pipeline: Pipeline) -> str:
    from farspan.units import format_bytes, format_seconds

    slowest = max(stage.rate_s for stage in pipeline.stages)
    rows = [
        (
            str(number),
            stage.device_class,
            f"{stage.replicas} x {stage.tensor_parallel}",
            str(len(stage.nodes)),
            format_seconds(stage.once_s),
            f"{stage.rate_s / slowest:.0%}" if slowest else "-",
            format_bytes(stage.memory_bytes),
            str(len(stage.options)),
            _span(stage.nodes),
        )
        for number, stage in enumerate(pipeline.stages)
    ]
    heads = ("stage", "class", "dp x tp", "nodes", "once", "busy", "memory", "options", "from .. to")
    return f"{_table(heads, rows)}\n{_verdict('step', pipeline)}"


def _verdict(what: str, result: Placement | Pipeline) -> str:
    from farspan.units import format_seconds

    return (
        f"{what} {format_seconds(result.value)}; no plan is below {format_seconds(result.bound)} "
        f"(gap {max(result.gap, 0.0):.1%}); searched for {format_seconds(result.search_s)}"
    )


def _span(nodes: tuple[str, ...]) -> str:
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} .. {nodes[-1]}"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)
    )

"""`farspan plan`: where to run what: a program's model, or a graph with costs (docs/planner-graph.md), on a cluster."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from farspan.cli.arguments import Parser, hint_options, whole_number
from farspan.cli.planned import plan_script
from farspan.cli.script import add_arguments
from farspan.errors import PlanError
from farspan.outputs import write_json, write_output
from farspan.units import MAX_COUNT

if TYPE_CHECKING:
    from farspan.planner.pipeline import Pipeline

__all__ = ["add_command", "check_use"]

_EXAMPLES = """examples:
  farspan plan train.py --lr 3e-4                       # for this machine; --lr is the script's
  farspan plan --cluster cluster.toml train.py          # for machines that need not be there
  farspan plan --cluster cluster.toml --roofline train.py
  farspan plan --max-memory 14GiB --pin 'decoder.*=rank:1' --together 'embed,head' train.py
  farspan plan --graph graph.json --cluster cluster.toml
"""


def add_command(commands: argparse._SubParsersAction[Parser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Adds the parser of `farspan plan` to those of the other commands."""
    parser = commands.add_parser(
        "plan",
        help="find out where to run what, before anything is run",
        description="Finds a plan for the model of a script, or for a graph with costs, on a cluster, and says how far "
        "from the best it can be. The script runs in this process up to its first steps.",
        usage="farspan plan [options] (script.py [args ...] | -m module [args ...] | --graph FILE)",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--graph", metavar="FILE", help="graph with costs (JSON), instead of a script")
    add_arguments(parser)
    parser.add_argument("--output", metavar="FILE", help="script: where the plan goes (default: plan.json)")
    parser.add_argument("--html", metavar="FILE", help="script: where the report goes (default: plan.html)")
    parser.add_argument(
        "--recalibrate",
        metavar="STEP",
        help="script: use what a step under the plan in --output has shown (farspan run --report step.json)",
    )
    hint_options.add_arguments(parser)
    parser.add_argument("--explain", metavar="MODULE", help="script: say why that module is where it is")
    parser.add_argument(
        "--micro-batches",
        type=whole_number(1, MAX_COUNT),
        default=None,
        metavar="M",
        help="micro-batches of a step (default: as many as the script has, by its loop or micro_batches=; graph: 8)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    check_use(arguments)
    if arguments.script_argv:
        return plan_script(arguments)

    from farspan.cluster import read_cluster
    from farspan.planner.cost_model import read_graph

    graph, cluster = read_graph(arguments.graph), read_cluster(arguments.cluster)
    from farspan.planner.partition_dp.stages import Rules
    from farspan.planner.pipeline import plan_pipeline

    num_micro_batches = 8 if arguments.micro_batches is None else arguments.micro_batches
    pipeline = plan_pipeline(graph, cluster, rules=Rules(micro_batches=num_micro_batches))
    if arguments.json:
        write_json(_pipeline_members(pipeline))
    else:
        write_output(_pipeline_text(pipeline))
    return 0


def check_use(arguments: argparse.Namespace) -> None:
    """Refuses options that do not go together, and a command line with nothing to plan.

    Raises:
        PlanError: It says which.
    """
    is_script = bool(arguments.script_argv)
    if is_script == (arguments.graph is not None):
        raise PlanError(
            "a script and a graph are both given." if is_script else "there is nothing to plan.",
            why="farspan plan finds a plan for one script, or for one graph.",
            hint="farspan plan --cluster cluster.toml train.py",
        )
    if not is_script and arguments.cluster is None:
        raise PlanError("which devices?", why="a graph is planned for a cluster.", hint="--cluster cluster.toml")
    for option, value in (
        ("--output", arguments.output),
        ("--html", arguments.html),
        ("--explain", arguments.explain),
        ("--recalibrate", arguments.recalibrate),
        ("--roofline", arguments.roofline or None),
        ("--fresh", arguments.fresh or None),
        *hint_options.given(arguments),
    ):
        if value is not None and not is_script:
            raise PlanError(f"{option} has no effect on a graph.", why="it belongs to scripts.", hint="leave it out")
    if arguments.explain is not None and not arguments.explain.strip():
        raise PlanError("--explain has no name.", why="it says why a module is where it is.", hint="--explain head")


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
    return {
        "format": "farspan-search/1",
        "objective": pipeline.objective,
        "value_s": pipeline.value,
        "lower_bound_s": pipeline.bound,
        "gap": pipeline.gap,
        "search_s": pipeline.search_s,
        "plan": {"stages": stages},
    }


def _pipeline_text(pipeline: Pipeline) -> str:
    from farspan.units import format_bytes, format_seconds, format_table

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
    return f"{format_table(heads, rows)}\n{_verdict(pipeline)}"


def _verdict(pipeline: Pipeline) -> str:
    from farspan.units import format_seconds

    return (
        f"step {format_seconds(pipeline.value)}; no plan is below {format_seconds(pipeline.bound)} "
        f"(gap {max(pipeline.gap, 0.0):.1%}); searched for {format_seconds(pipeline.search_s)}"
    )


def _span(nodes: tuple[str, ...]) -> str:
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} .. {nodes[-1]}"

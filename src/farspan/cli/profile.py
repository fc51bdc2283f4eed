"""`farspan profile train.py`: what a step of a program takes, as a graph with costs for `farspan plan --graph`."""

from __future__ import annotations

import argparse

from farspan.cli.arguments import Parser
from farspan.cli.script import add_arguments, check_script, profile_script
from farspan.errors import LaunchError
from farspan.outputs import check_outputs, write_output, write_text
from farspan.units import count_of

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[Parser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Adds the parser of `farspan profile` to those of the other commands."""
    parser = commands.add_parser(
        "profile",
        help="find out what the parts of a model take",
        description="Runs a script up to its first training steps and writes what each part of its model takes, "
        "as a graph with costs.",
        usage="farspan profile [options] (script.py | -m module) [args ...]",
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.add_argument("--output", metavar="FILE", default="profile.json", help="default: profile.json")
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from farspan.cluster import read_cluster

    script_argv: list[str] = arguments.script_argv
    if not script_argv:
        raise LaunchError("no script to run.", why="farspan profile runs a script.", hint="farspan profile train.py")
    check_script(script_argv)
    inputs = [arguments.cluster, *(script_argv[:1] if script_argv[0] != "-m" else [])]
    check_outputs({"--output": arguments.output}, inputs)
    cluster = None if arguments.cluster is None else read_cluster(arguments.cluster)

    # What follows imports torch, and may take long.
    from farspan.planner.cost_model import write_graph
    from farspan.profile import costed_graph, this_machine

    profile, _ = profile_script(script_argv, cluster, roofline=arguments.roofline, fresh=arguments.fresh)
    graph = costed_graph(profile, cluster or this_machine(), roofline=arguments.roofline)
    write_text(arguments.output, write_graph(graph))
    for note in profile.notes:
        write_output(f"note: {note}")
    write_output(
        f"{count_of(len(graph.nodes), 'unit')}, {count_of(profile.num_unique, 'kind')}; wrote {arguments.output}\n"
        f"farspan plan --graph {arguments.output} --micro-batches {profile.num_micro_batches} --cluster cluster.toml"
    )
    return 0

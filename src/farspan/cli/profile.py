"""`farspan profile train.py`: what a step of a program takes, as a graph with costs for `farspan plan --graph`."""

from __future__ import annotations

import argparse
import sys

from farspan.cli.script import add_arguments, profile_script
from farspan.outputs import write_text

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
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
    from farspan.errors import LaunchError
    from farspan.planner.costed import write_graph
    from farspan.profile import costed_graph, this_machine

    if not arguments.script_argv:
        raise LaunchError("no script to run.", why="farspan profile runs a script.", hint="farspan profile train.py")
    cluster = None if arguments.cluster is None else read_cluster(arguments.cluster)
    profile, _ = profile_script(arguments.script_argv, cluster, roofline=arguments.roofline, fresh=arguments.fresh)
    graph = costed_graph(profile, cluster or this_machine(), roofline=arguments.roofline)
    write_text(arguments.output, write_graph(graph))
    for note in profile.notes:
        sys.stdout.write(f"note: {note}\n")
    sys.stdout.write(
        f"{len(graph.nodes)} pieces, {profile.num_unique} kinds; wrote {arguments.output}\n"
        f"farspan plan --graph {arguments.output} --micro-batches {profile.num_micro_batches} --cluster cluster.toml\n"
    )
    return 0

"""`farspan doctor`: look at the hosts of a run before it is started."""

from __future__ import annotations

import argparse

from farspan import settings
from farspan.cli.arguments import Parser
from farspan.errors import FarspanError
from farspan.outputs import check_outputs, write_output, write_text

__all__ = ["add_command"]

_EXAMPLES = """\
examples:
  farspan doctor                                        # this machine
  farspan doctor --hosts a:2,b:4                        # all hosts, and the links between them
  farspan doctor --hosts hosts.txt --out cluster.toml   # and the file for farspan plan --cluster
"""


def add_command(commands: argparse._SubParsersAction[Parser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Adds the parser of `farspan doctor` to those of the other commands."""
    parser = commands.add_parser(
        "doctor",
        help="look at the hosts of a run: versions, clocks, ports, links, memory, devices, limits",
        description="Looks at this machine or at the hosts of a run, and says what would be in the way of the run and "
        "what mends it. The exit code is 1 if there is anything.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--hosts", metavar="HOSTS", default="localhost", help="as for farspan run (default: this machine alone)"
    )
    parser.add_argument(
        "--ssh", metavar="COMMAND", default="ssh", help="what runs a line on a host, instead of ssh: COMMAND HOST LINE"
    )
    parser.add_argument("--out", metavar="FILE", help="write the hosts as a cluster file for farspan plan")
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from farspan.launch.doctor.cluster_file import format_cluster
    from farspan.launch.doctor.examine import examine
    from farspan.launch.doctor.findings import find_wrong
    from farspan.launch.doctor.show import format_examination
    from farspan.launch.hosts import read_hosts

    settings.check()
    check_outputs({"--out": arguments.out})
    found = examine(read_hosts(arguments.hosts), arguments.ssh)
    wrong: list[FarspanError] = [*find_wrong(found)]
    tables = format_examination(found)
    if tables:
        write_output(tables + "\n")
    if arguments.out is not None:
        try:
            write_text(arguments.out, format_cluster(found) + "\n")
        except FarspanError as error:
            wrong.append(error)
    for error in wrong:
        write_output(f"wrong: {error}\n")
    write_output(f"{len(wrong)} wrong" if wrong else "nothing is wrong")
    return 1 if wrong else 0

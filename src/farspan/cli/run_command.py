"""`farspan run`: start the processes of a training script on this machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farspan import settings
from farspan.cli.arguments import Parser, host_range, whole_number
from farspan.cli.arguments.misplaced import hint_at_misplaced
from farspan.errors import LaunchError
from farspan.launch.roles import read_role
from farspan.outputs import check_outputs

if TYPE_CHECKING:
    from farspan.launch.hosts import Fleet

__all__ = ["add_command", "check_use", "split_script"]

_MOST_PROCESSES = 4096
_SUFFIXES = (".html", ".svg", ".json")
_WITH_VALUE = (
    "-n",
    "--num-processes",
    "--log-dir",
    "--report",
    "--files",
    "--max-restarts",
    "--hosts",
    "--ssh",
    "--nnodes",
    "--join",
    "--node-rank",
    "--role",
    "--debug",
)
_RARE_IN_SCRIPTS = (
    "--report",
    "--log-dir",
    "--files",
    "--max-restarts",
    "--keep-going",
    "--standby",
    "--nnodes",
    "--node-rank",
    "--role",
)
"""Options of which it is said that they stand behind a script which does not name them."""
_MOST_RESTARTS = 1_000_000
_EXAMPLES = """\
everything after the script or module belongs to it:
  farspan run -n 4 train.py --lr 3e-4
  farspan run -n 4 -m package.train --lr 3e-4
  farspan run -n 4 --report step.html train.py
  farspan run -n 4 --debug 2 train.py
  farspan run --hosts a:2,b:4 --max-restarts 10 train.py
  farspan run --role actor=4 --role learner=2 train.py
  farspan run --role actor=4 --role learner=2 --hosts a:2,b:4 train.py
"""


def add_command(commands: argparse._SubParsersAction[Parser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Adds the parser of `farspan run` to those of the other commands."""
    parser = commands.add_parser(
        "run",
        help="start a script in several processes on this machine",
        description="Starts a script in several processes on this machine. Rank 0 has the console, and all "
        "have logs; if a rank fails, its traceback is shown once.",
        usage="farspan run (-n N | --hosts HOSTS | --role NAME=N ...) [options] "
        "(script.py | -m module | executable) [args ...]",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n",
        "--num-processes",
        type=whole_number(1, _MOST_PROCESSES),
        metavar="N",
        help="number of processes (ranks)",
    )
    parser.add_argument(
        "--hosts",
        metavar="HOSTS",
        help="a:2,b:4 for two processes on a and four on b, or a file with a line for each host; by ssh from here",
    )
    parser.add_argument(
        "--nnodes",
        metavar="MIN[:MAX]",
        type=host_range,
        help="how many hosts the run needs (default: all), so that it starts or goes on without the others",
    )
    parser.add_argument(
        "--join", metavar="HOST:PORT", help="where there is no ssh: the first host, which listens there, and the others"
    )
    parser.add_argument(
        "--node-rank",
        metavar="K",
        type=whole_number(0, _MOST_PROCESSES),
        help="with --join: 0 for the first host; of the others their order (default: as they come)",
    )
    parser.add_argument(
        "--ssh", metavar="COMMAND", default="ssh", help="what runs a line on a host, instead of ssh: COMMAND HOST LINE"
    )
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        type=read_role,
        metavar="NAME=N",
        help="N processes of a role (farspan.role()); several times. The run is over when the role named last is; the "
        "processes of others come and go",
    )
    parser.add_argument("--log-dir", metavar="DIR", help="folder for rank0.log, ... (default: a fresh one)")
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="write a report of a training step (.html), its picture (.svg), or the file for `farspan report` (.json)",
    )
    parser.add_argument(
        "--files",
        choices=("first", "all"),
        help="whose files are the script's: those of the first rank (the others' are removed at the end), or of all",
    )
    parser.add_argument(
        "--max-restarts",
        type=whole_number(0, _MOST_RESTARTS),
        metavar="N",
        default=0,
        help="how often all ranks are started again after one has failed (default: 0)",
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="if a rank is lost, let other groups (data_parallel), or members of wide stages, go on in their processes",
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help="with --max-restarts: once something is saved, keep processes for the next start ready, with torch loaded",
    )
    parser.add_argument(
        "--debug",
        metavar="RANK",
        type=whole_number(0, _MOST_PROCESSES),
        help="give this rank the console, for breakpoint() and pdb; the others wait for it as long as it takes",
    )
    parser.add_argument(
        "--sanitize",
        nargs="?",
        const=1,
        type=whole_number(1, settings.GREATEST_SEED),
        metavar="SEED",
        help="check all that farspan relies on while the script runs, slowly; --sanitize=7 for other orders and delays",
    )
    parser.add_argument("--verbose", action="store_true", help="say more, here and in the script")
    parser.set_defaults(execute=_execute)


def split_script(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line of farspan into its own words and those of the script.

    By hand, because argparse (nargs=REMAINDER) drops a `--` of the script in some versions of Python.

    >>> split_script(["run", "-n", "4", "train.py", "-n", "5", "--"])
    (['run', '-n', '4'], ['train.py', '-n', '5', '--'])
    """
    if list(words[:1]) != ["run"]:
        return list(words), []
    i = 1
    while i < len(words) and words[i].startswith("-") and words[i] not in ("-m", "--"):
        i += 2 if words[i] in _WITH_VALUE else 1
    script = list(words[i:])
    return list(words[:i]), script[1:] if script[:1] == ["--"] else script


def _execute(arguments: argparse.Namespace) -> int:
    from farspan.launch.roles.run_roles import run_roles
    from farspan.launch.run_job import run

    script_argv: list[str] = arguments.script_argv
    settings.check()
    hint_at_misplaced("run", script_argv, _RARE_IN_SCRIPTS)
    environment: dict[str, str] = {}
    if arguments.report is not None:
        environment["FARSPAN_REPORT"] = _check_report(arguments.report)
    if arguments.sanitize is not None:
        environment["FARSPAN_SANITIZE"] = str(arguments.sanitize)
    if arguments.verbose:
        environment["FARSPAN_VERBOSE"] = "1"
    check_use(arguments)
    fleet: Fleet | None = None
    if arguments.join is not None:
        from farspan.launch.hosts import join_run, read_address

        if arguments.node_rank != 0:
            return join_run(script_argv, read_address(arguments.join), arguments.num_processes, arguments.node_rank)
        fleet = _listening_fleet(arguments)
    elif arguments.hosts is not None:
        fleet = _fleet(arguments)
    if arguments.role:
        return run_roles(
            script_argv,
            arguments.role,
            log_dir=arguments.log_dir,
            environment=environment,
            files=arguments.files,
            max_restarts=arguments.max_restarts,
            keeps_going=arguments.keep_going,
            fleet=fleet,
        )
    return run(
        script_argv,
        fleet.num_processes if fleet is not None else arguments.num_processes,
        log_dir=arguments.log_dir,
        environment=environment,
        files=arguments.files,
        verbose=arguments.verbose,
        max_restarts=arguments.max_restarts,
        keeps_going=arguments.keep_going,
        has_standby=arguments.standby,
        debugged=arguments.debug,
        fleet=fleet,
    )


def check_use(arguments: argparse.Namespace) -> None:
    """Refuses options that do not go together, and a command line without a number of processes.

    Raises:
        LaunchError: It says which.
    """
    if arguments.debug is not None:
        _check_debugged(arguments)
    if arguments.role:
        _check_roles(arguments)
    _check_count(arguments)


def _check_debugged(arguments: argparse.Namespace) -> None:
    """Refuses what cannot be while a debugger is in one rank."""
    others = {
        "--hosts": "the debugger has the console and keyboard of this machine.",
        "--join": "the debugger has the console and keyboard of this machine.",
        "--role": "a rank is of one program.",
        "--max-restarts": "who ends the debugger ends the run.",
        "--standby": "who ends the debugger ends the run.",
        "--keep-going": "the others wait for the rank that the debugger is in.",
    }
    for option, why in others.items():
        if getattr(arguments, option.removeprefix("--").replace("-", "_")):
            raise LaunchError(
                f"--debug and {option} do not go together.", why=why, hint="farspan run -n 4 --debug 2 train.py"
            )
    number = arguments.num_processes
    if number is not None and arguments.debug >= number:
        raise LaunchError(
            f"--debug {arguments.debug} is no rank of {number}.",
            why="ranks count from 0.",
            hint=f"--debug {number - 1}",
        )


def _check_count(arguments: argparse.Namespace) -> None:
    """Refuses a command line that does not say how many processes there are."""
    is_said = arguments.hosts is not None or (bool(arguments.role) and arguments.join is None)
    if arguments.num_processes is None and not is_said:
        script: list[str] = arguments.script_argv
        count = "4"
        if len(script) > 1 and script[0].isdecimal():  # farspan run 2 train.py
            count, *script = script
        join = "" if arguments.join is None else f"--join {arguments.join} "
        raise LaunchError(
            "how many processes?",
            why="-n is missing, or --hosts, or --role; options of farspan run come before the script.",
            hint=f"farspan run -n {count} {join}{' '.join(script) or 'train.py'}",
        )


def _check_roles(arguments: argparse.Namespace) -> None:
    """Refuses what does not go together with --role."""
    what, why, hint = "", "", ""
    if arguments.num_processes is not None and arguments.join is None:
        what, hint = "-n", "farspan run --role actor=4 --role learner=2 train.py"
        why = "each role has its number of processes; with --join, -n says how many slots this host has."
    elif arguments.join is not None and arguments.node_rank != 0:
        what, hint = "a host that joins", f"farspan run -n 4 --join {arguments.join} train.py"
        why = "the first host (--node-rank 0) says which roles there are; the others say how many slots they have."
    elif arguments.standby:
        what, hint = "--standby", "farspan run --role ... without --standby"
        why = "processes are kept ready for one program."
    if what:
        raise LaunchError(f"--role and {what} do not go together.", why=why, hint=hint)


def _fleet(arguments: argparse.Namespace) -> Fleet:
    from farspan.launch.hosts import Fleet, read_hosts

    if arguments.num_processes is not None:
        raise LaunchError(
            f"-n {arguments.num_processes} and --hosts say the number of processes twice.",
            why="--hosts has a number for each host.",
            hint=f"--hosts {arguments.hosts}",
        )
    hosts = read_hosts(arguments.hosts)
    fewest, most = arguments.nnodes or (len(hosts), len(hosts))
    if not fewest <= len(hosts) <= most:
        raise LaunchError(
            f"--nnodes {fewest}:{most} and {len(hosts)} hosts in --hosts.",
            why="--nnodes says how many of the hosts in --hosts the run needs.",
            hint=f"--nnodes 1:{len(hosts)}",
        )
    return Fleet(hosts, arguments.script_argv, ssh=arguments.ssh, fewest=fewest)


def _listening_fleet(arguments: argparse.Namespace) -> Fleet:
    from farspan.launch.hosts import Host, JoinedFleet, read_address

    if arguments.hosts is not None or arguments.nnodes is None:
        raise LaunchError(
            "how many hosts?" if arguments.nnodes is None else "--join and --hosts do not go together.",
            why="the first host, --node-rank 0, waits for that many."
            if arguments.nnodes is None
            else "--hosts starts the other hosts by ssh; with --join they come by themselves.",
            hint="farspan run -n 2 --nnodes 2 --node-rank 0 --join HOST:29400 train.py",
        )
    fewest, most = arguments.nnodes
    own = Host(name="localhost", num_processes=arguments.num_processes)
    port = read_address(arguments.join)[1]
    return JoinedFleet(own, arguments.script_argv, port=port, fewest=fewest, most=most)


def _check_report(file: str) -> str:
    """Returns the absolute path of the report, refused now rather than after hours of training."""
    if os.path.splitext(file)[1] not in _SUFFIXES:
        why = f"the end of its name says what it is to be: {', '.join(_SUFFIXES)}."
        raise LaunchError(f"--report {file} is no report.", why=why, hint="--report step.html")
    check_outputs({"--report": file})
    return os.path.abspath(file)

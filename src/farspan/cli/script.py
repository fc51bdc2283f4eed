"""A program that is run for its first steps only: its words on the command line, and its profile."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

from farspan.errors import LaunchError

if TYPE_CHECKING:
    from farspan.cluster import Cluster
    from farspan.plan.hints import Hints
    from farspan.profile import StepProfile

__all__ = ["add_arguments", "check_script", "profile_script", "split_script"]

_WITH_VALUE = (
    "--graph",
    "--cluster",
    "--micro-batches",
    "--output",
    "--html",
    "--explain",
    "--recalibrate",
    "--max-memory",
    "--pin",
    "--together",
    "--stages",
)
_AFTER_THE_SCRIPT = {"--cluster": 1, "--explain": 1, "--recalibrate": 1, "--roofline": 0, "--fresh": 0}
"""Options that may also come right after the script, with how many words each; a script hardly has them."""
_EXAMPLE = "farspan plan --cluster cluster.toml train.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what all commands that run a program have in common."""
    parser.add_argument(
        "--roofline",
        action="store_true",
        help="measure nothing: take seconds from the work that is counted and the speeds of the devices",
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what has been measured before")
    parser.add_argument("--cluster", metavar="FILE", help="hosts, devices and links (TOML); by default this machine")


def split_script(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the words of farspan and those of the script.

    >>> split_script(["plan", "--cluster", "c.toml", "train.py", "--steps", "9"])
    (['plan', '--cluster', 'c.toml'], ['train.py', '--steps', '9'])
    >>> split_script(["plan", "train.py", "--cluster", "c.toml", "--fresh", "--json"])
    (['plan', '--cluster', 'c.toml', '--fresh'], ['train.py', '--json'])
    >>> split_script(["plan", "-m", "package.train", "--", "--fresh"])
    (['plan'], ['-m', 'package.train', '--fresh'])
    """
    i = 1
    while i < len(words) and words[i].startswith("-") and words[i] not in ("-m", "--"):
        i += 2 if words[i] in _WITH_VALUE else 1
    own, script = list(words[:i]), list(words[i:])
    if script[:1] == ["--"]:
        return own, script[1:]
    start = 2 if script[:1] == ["-m"] else 1
    j = start
    while j < len(script) and script[j] in _AFTER_THE_SCRIPT:
        j += 1 + _AFTER_THE_SCRIPT[script[j]]
    own += script[start:j]
    return own, script[:start] + script[j + 1 if script[j : j + 1] == ["--"] else j :]


def check_script(script_argv: Sequence[str]) -> None:
    """Refuse what is no program, before anything is imported for it.

    Raises:
        LaunchError: There is no such file or module, or the file is no Python.
    """
    if script_argv[0] != "-m":
        _check_file(script_argv[0])
    elif len(script_argv) < 2:
        raise LaunchError("no script to run.", why="-m needs the name of a module.", hint=_EXAMPLE)
    elif not _has_module(script_argv[1].partition(".")[0]):
        raise LaunchError(f"there is no module {script_argv[1]}.", why=f"looked in {os.getcwd()}.", hint=_EXAMPLE)


def _check_file(path: str) -> None:
    import warnings
    import zipfile
    from pathlib import Path

    from farspan.launch.attempts.command import describe_scripts

    if not os.path.isfile(path):
        raise LaunchError(f"there is no script {path}.", why=describe_scripts(Path(path)), hint=_EXAMPLE)
    if zipfile.is_zipfile(path):
        return
    try:
        if path.endswith((".json", ".toml")):  # which Python may well take for a program
            raise SyntaxError("its name is that of a document", (path, 1, 1, ""))
        with open(path, "rb") as file, warnings.catch_warnings(action="ignore"):  # runpy will show them
            compile(file.read(), path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise LaunchError(
            f"{path} is no program of Python.", why=f"{line}.", hint="--graph FILE, if it is a graph with costs"
        ) from None


def _has_module(name: str) -> bool:
    """Returns whether a top-level module can be found from here, without running it."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    try:
        return bool(name) and (PathFinder.find_spec(name, [os.getcwd()]) or find_spec(name)) is not None
    except (ImportError, ValueError):
        return False


def _is_of_runpy(error: ImportError) -> bool:
    """Returns whether the error says that a module cannot be run, and not that the module cannot import another one."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_globals.get("__name__") == "runpy"


def profile_script(
    script_argv: Sequence[str], cluster: Cluster | None, *, roofline: bool, fresh: bool, hints: Hints | None = None
) -> tuple[StepProfile, Hints]:
    """Run a program in this process up to its first steps; what it prints goes to stderr.

    Args:
        script_argv: A python file, or `-m` and a module; then its arguments.
        cluster: The devices to plan for; None for this machine.
        roofline: Count the work instead of running it.
        fresh: Do not use what has been measured before.
        hints: For the plan that is wanted.

    Returns:
        What a step takes; and these hints and those of the program, over which they win.

    Raises:
        LaunchError: It is no program of Python.
        PlanError: It trains no distributed model.
    """
    import runpy

    from farspan.place.measure.trial import Trial
    from farspan.profile import ProfileCache, cache_folder, needs_measuring, this_device, this_machine

    is_module = script_argv[0] == "-m"
    is_dry = roofline or (cluster is not None and not needs_measuring(cluster, this_device()))
    argv, path = sys.argv, list(sys.path)
    sys.argv = list(script_argv[1:] if is_module else script_argv)
    sys.path.insert(0, "" if is_module else os.path.dirname(os.path.realpath(script_argv[0])))
    try:
        with (
            _bar("counting" if is_dry else "measuring") as progress,
            contextlib.redirect_stdout(sys.stderr),
            Trial(
                num_devices=lambda: (cluster or this_machine()).num_devices,
                is_dry=is_dry,
                has_fake_weights=is_dry,
                cache=ProfileCache(cache_folder("profiles"), is_fresh=fresh),
                hints=hints,
                progress=progress,
            ) as trial,
        ):
            if is_module:
                runpy.run_module(script_argv[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script_argv[0], run_name="__main__")
    except ImportError as error:
        if not _is_of_runpy(error):
            raise
        raise LaunchError(f"{script_argv[1]} cannot be run.", why=f"{error}.", hint=_EXAMPLE) from None
    finally:
        sys.argv, sys.path[:] = argv, path
    return trial.profile(), trial.hints


@contextlib.contextmanager
def _bar(what: str) -> Generator[Callable[[float], None]]:
    """A bar on stderr, where that is a terminal; its caller reports how much is done. What is printed goes above it."""
    if not sys.stderr.isatty():
        yield lambda share: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda share: progress.update(task, completed=share)

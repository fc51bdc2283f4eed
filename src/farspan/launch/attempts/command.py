"""Finds the command line that starts a rank: a python file, a module or an executable, tied to the launcher's life."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from farspan.errors import LaunchError

__all__ = ["describe_scripts", "find_command"]

_EXAMPLE = "farspan run -n 4 train.py"


def find_command(script_argv: Sequence[str]) -> list[str]:
    """Returns the command line that runs a python file, a module or an executable, tied to our life on Linux."""
    argv = list(script_argv)
    if not argv or argv == ["-m"]:
        raise LaunchError(
            "no script to run.",
            why="the command line ends before it." if not argv else "-m needs the name of a module.",
            hint=f"{_EXAMPLE}\nfarspan run -n 4 -m package.module",
        )
    if not argv[0]:
        raise LaunchError("no script to run.", why='the name given is empty: "".', hint=_EXAMPLE)
    script = Path(argv[0])
    if argv[0] == "-m" or (argv[0].endswith(".py") and script.is_file()):
        command = [sys.executable, *argv]
    elif script.is_file() and os.access(script, os.X_OK):
        command = [str(script.absolute()), *argv[1:]]
    elif (found := shutil.which(argv[0])) is not None and not script.is_file():
        command = [found, *argv[1:]]
    else:
        raise _explain_missing(script)
    if sys.platform == "linux":
        shim = Path(__file__).parents[1] / "child.py"
        command = [sys.executable, "-I", "-S", str(shim), str(os.getpid()), *command]
    return command


def _explain_missing(script: Path) -> LaunchError:
    if script.is_file():
        return LaunchError(
            f"{script} is neither a python file nor executable.",
            why="its name does not end in .py and its x permission is not set.",
            hint=f"chmod +x {script}     or farspan run -n 4 python {script}",
        )
    if script.is_dir():
        return LaunchError(
            f"{script} is a folder, not a script.",
            why="farspan run starts a .py file, -m and a module, or an executable; "
            + describe_scripts(script / "train.py"),
            hint=_in_folder(script),
        )
    return LaunchError(
        f"there is no script {script}.",
        why=describe_scripts(script),
        hint=f"{_EXAMPLE}     (options of farspan run come before the script)",
    )


def _in_folder(folder: Path) -> str:
    """Returns what starts a program of a folder: its package, where it can be run from here, or a script in it."""
    is_below = bool(folder.parts) and all(part.isidentifier() for part in folder.parts)
    if is_below and (folder / "__main__.py").is_file():
        return f"farspan run -n 4 -m {'.'.join(folder.parts)}"
    names = sorted(path.name for path in folder.glob("*.py"))
    return f"farspan run -n 4 {folder / (names[0] if names and 'train.py' not in names else 'train.py')}"


def describe_scripts(script: Path) -> str:
    """Returns where a script that is not there was looked for, and which are there: the nearest by name, if any is."""
    import difflib  # only where it is of use

    folder = script.parent
    names = sorted(path.name for path in folder.glob("*.py")) if folder.is_dir() else []
    near = difflib.get_close_matches(script.name[:100], names, n=3) or names[:5]
    return f"looked in {folder.absolute()}" + (f", which has {', '.join(near)}." if near else ".")

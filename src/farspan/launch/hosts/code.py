"""Whether a host has the same program: versions of Python, torch and farspan, and the files of the script.

The files are the script and all Python files in its folder and below, without hidden folders and virtual environments.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from farspan.errors import LaunchError
from farspan.launch.hosts.host import Host

__all__ = ["check_same", "code_of", "versions"]

_MOST_FILES = 2000
_SHOWN = 3


def versions() -> dict[str, str]:
    """Returns the versions of what all hosts must have alike, without importing any of it."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": _version_of("torch").partition("+")[0],  # a build for GPUs may go with one for the CPU
        "farspan": f"{_version_of('farspan')} ({_digest_of(_python_files(Path(__file__).parents[2]))})",
    }


def code_of(script_argv: Sequence[str]) -> dict[str, str]:
    """Returns digests of the files of a script by their paths, seen from the folder that it is started in."""
    script = Path(script_argv[0])
    if script_argv[0] == "-m":
        files = _python_files(Path("."))
    elif script.suffix == ".py":
        files = [script, *_python_files(script.parent)]
    else:
        files = iter([script]) if script.is_file() else iter(())
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


def check_same(host: Host, theirs: Mapping[str, str], here: Mapping[str, str], code: Mapping[str, str]) -> None:
    """Raises if a host has other versions or other code.

    Args:
        host: Which.
        theirs: What it has: versions and digests of files, by name.
        here: Versions here.
        code: Digests here.

    Raises:
        LaunchError: Something differs.
    """
    for name, version in here.items():
        if theirs.get(name) != version:
            raise LaunchError(
                f"{host.name} has another {name}.",
                why=f"{theirs.get(name) or 'none'} there, {version} here.",
                hint=f"the same {name} on both; python= in a hosts file says which interpreter {host.name} is to use",
            )
    names = [name for name in sorted({*code, *theirs} - {*here}) if theirs.get(name) != code.get(name)]
    if names:
        shown = [f"{name} {_difference(name, theirs, code)}" for name in names[:_SHOWN]]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise LaunchError(
            f"{host.name} has another program.",
            why=f"{', '.join(shown)}{more}.",
            hint=f"rsync -a --include '*/' --include '*.py' --exclude '*' ./ {host.name}:{host.folder or os.getcwd()}/",
        )


def _difference(name: str, theirs: Mapping[str, str], code: Mapping[str, str]) -> str:
    if name not in theirs:
        return "is not there"
    return "is not here" if name not in code else "differs"


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _python_files(folder: Path) -> Iterator[Path]:
    num_left = _MOST_FILES
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith((".", "__pycache__")) and not os.path.exists(f"{top}/{name}/pyvenv.cfg")
        )
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(top) / name
                num_left -= 1
                if not num_left:  # nor are further folders looked through: the script may lie in the one of a home
                    return


def _digest_of(files: Iterator[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]

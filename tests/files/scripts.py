"""Scripts that read and write files, as people write them for one process, and what each rank made of them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.launcher import TIMEOUT_S
from tests.support.ranks import SOURCES, run_processes
from tests.support.warm.commands import farspan_run

__all__ = ["Outcome", "run_plainly", "run_script", "run_warm"]

_WAIT = """
import os as _os, posix as _posix, atexit as _atexit
if _os.environ.get("FARSPAN_RANK", "0") == "{late}":
    _posix.read(_posix.open("{fifo}", _posix.O_RDONLY), 1)
else:
    # Not `open`, which may be replaced; the last of all that is done at exit.
    _atexit.register(lambda: _posix.write(_posix.open("{fifo}", _posix.O_WRONLY), b"x"))
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run has left.

    Attributes:
        printed: By each rank.
        files: A digest of each file, the target of each link, "" for each folder; by relative path.
        error: What the launcher said.
    """

    printed: list[str]
    files: dict[str, str]
    error: str


def run_script(
    folder: Path, text: str, num_ranks: int, *, late: int | None = None, files: str = "first", is_warm: bool = False
) -> Outcome:
    """Run a script in a fresh copy of the folder `start` below `folder`.

    Args:
        folder: For all that the test needs.
        text: Of the script.
        num_ranks: How many processes.
        late: A rank that begins when the other one (of two) has ended.
        files: As `farspan run --files`.
        is_warm: Whether the processes have torch loaded already, which takes less.
    """
    logs = folder / "logs"
    subprocess.run(["rm", "-rf", logs], check=True)
    work = _fresh_copy(folder)
    if late is not None:
        fifo = folder / f"fifo{late}"
        if not fifo.exists():
            os.mkfifo(fifo)
        text = _WAIT.format(late=late, fifo=fifo) + text
    script = folder / "script.py"
    script.write_text(text)
    words = ["-n", str(num_ranks), "--log-dir", str(logs), "--files", files, str(script)]
    environment = {"PYTHONDONTWRITEBYTECODE": "1", "FARSPAN_FILES": ""}
    if is_warm:
        done = farspan_run(words, folder=work, environment=environment, timeout_s=TIMEOUT_S)
    else:
        done = subprocess.run(
            [sys.executable, "-m", "farspan", "run", *words],
            cwd=work,
            env={**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    printed = [done.stdout, *[(logs / f"rank{rank}.log").read_text() for rank in range(1, num_ranks)]]
    return Outcome(printed=printed, files=_files_in(work), error=done.stderr)


def run_plainly(folder: Path, text: str) -> Outcome:
    """Run a script in one process, without a launcher, in a fresh copy of the folder `start` below `folder`."""
    return run_warm(folder, text, 1, {})


def run_warm(folder: Path, text: str, num_ranks: int, environment: dict[str, str]) -> Outcome:
    """Run a script in ranks that find only the usual variables, and torch loaded, as `run_processes` does."""
    work, script = _fresh_copy(folder), folder / "script.py"
    script.write_text(f"import os\nos.chdir({str(work)!r})\n{text}")
    environment = {"PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = run_processes(num_ranks, script, timeout_s=TIMEOUT_S, environment=environment)
    assert [each.stderr for each in done if each.code] == []
    return Outcome(printed=[each.stdout for each in done], files=_files_in(work), error=done[0].stderr)


def _fresh_copy(folder: Path) -> Path:
    """Return the folder `work`, which is now as `start` is."""
    work = folder / "work"
    subprocess.run(["rm", "-rf", work], check=True)
    (folder / "start").mkdir(exist_ok=True)
    subprocess.run(["cp", "-a", folder / "start", work], check=True)
    return work


def _files_in(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    return found

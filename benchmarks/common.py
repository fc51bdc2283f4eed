"""What the benchmarks share: starting ranks, a line about the machine, the arguments and the verdict."""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

__all__ = ["ROOT", "arguments", "data_folder", "finish", "machine", "micros", "published", "run_ranks"]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a version under a minute")
    parser.add_argument("--check", action="store_true", help="exit 0 only where the claim's bar holds")
    parser.add_argument("--json", metavar="FILE", help="write all rows")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)  # what a rank's process is started with
    return parser


def finish(args: argparse.Namespace, *, rows: Sequence[dict[str, Any]], figure: str, holds: bool) -> None:
    """Write the rows, print the figure on the last line, and with --check exit 1 where the bar does not hold."""
    if args.json:
        document = {"machine": machine(), "figure": figure, "holds": holds, "rows": list(rows)}
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    print(machine())
    print(f"{figure}: {'holds' if holds else 'DOES NOT HOLD'}", flush=True)
    sys.exit(1 if args.check and not holds else 0)


def data_folder() -> Path:
    """Where public profiles and published figures lie: BENCHMARK_DATA, by default ../shared/data."""
    return Path(os.environ.get("BENCHMARK_DATA") or ROOT.parent / "shared" / "data")


def machine() -> str:
    """The machine, its load and the versions, on one line."""
    import torch

    load = ", load " + "/".join(f"{value:.1f}" for value in os.getloadavg())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        f"{_processor()}, {os.cpu_count()} cores{load}, {platform.system()} {platform.release()}, {versions}, {today}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def published(name: str) -> list[dict[str, str]]:
    """The rows of a table others have published: a CSV file of the data folder.

    Raises:
        SystemExit: It is not there.
    """
    file = data_folder() / "published" / name
    if not file.is_file():
        sys.exit(f"{file} does not exist; BENCHMARK_DATA=folder says where the published tables are")
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def micros(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us"


def run_ranks(
    script: str,
    num_ranks: int,
    words: Sequence[str],
    *,
    timeout_s: float,
    prefix_of: Callable[[int], Sequence[str]] = lambda rank: (),
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run `script --worker FILE words...` as `num_ranks` processes of one thread each; return the JSON in FILE.

    Args:
        script: The benchmark itself.
        num_ranks: How many.
        words: More arguments.
        timeout_s: When they are ended.
        prefix_of: What stands before a rank's command.
        environment: More variables.

    Raises:
        RuntimeError: A process failed, or not all had ended after `timeout_s` seconds; none is left behind.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        result = Path(folder, "result.json")
        processes = [
            subprocess.Popen(
                [*prefix_of(rank), sys.executable, script, "--worker", str(result), *words],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(num_ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                    "FARSPAN_FILES": "all",
                    **(environment or {}),
                },
                start_new_session=True,
            )
            for rank in range(num_ranks)
        ]
        end = time.monotonic() + timeout_s
        try:
            codes = [process.wait(max(0.1, end - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the ranks of {script} ran longer than {timeout_s:g} s") from None
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if any(codes):
            raise RuntimeError(f"the ranks of {script} ended with {codes}")
        return json.loads(result.read_text())

"""Services: calls a second between two processes of a run, and how soon the loss of one is noticed.

    rates    one process has the object, others call it, as on one host and as from another one (two launchers on
             127.0.0.1); torch.distributed.rpc does the same, in turns with farspan
    kills    an actor kills itself while a call is under way; the caller has its error, the launcher says so, the actor
             is started again and called

Both ends read one clock (CLOCK_MONOTONIC of this machine).
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402

HERE = Path(__file__).parent
LEAST_CALLS_PER_S = 10_000
MOST_NOTICED_S = 3.0
TIMEOUT_S = 300
SIDES = ("farspan", "farspan by TCP", "torch rpc")


def farspan(script: str, out: Path, *words: str, roles: tuple[str, ...], restarts: int = 0) -> list[tuple[float, str]]:
    """Runs a script in roles; returns what the launcher said, each line with the time at which it came."""
    options = [word for role in roles for word in ("--role", role)]
    command = [sys.executable, "-m", "farspan", "run", *options, "--max-restarts", str(restarts)]
    process = subprocess.Popen(
        [*command, str(HERE / script), str(out), *words],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    said = [(time.monotonic(), line.rstrip()) for line in process.stderr]
    if process.wait(TIMEOUT_S):
        raise SystemExit("\n".join(line for _, line in said))
    return said


def farspan_on_hosts(script: str, out: Path, *words: str) -> None:
    """Runs it as on two hosts: four callers on the first one, the server on the second one."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        join = ["--join", f"127.0.0.1:{probe.getsockname()[1]}"]
    roles = ["--role", "server=1", "--role", "caller=4"]
    hosts = [["-n", "4", "--nnodes", "2", "--node-rank", "0", *join, *roles], ["-n", "1", *join]]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "farspan", "run", *options, str(HERE / script), str(out), *words],
            env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "FARSPAN_SECRET": "of both"},
            stderr=subprocess.DEVNULL,
        )
        for options in hosts
    ]
    codes = [process.wait(TIMEOUT_S) for process in processes]
    if any(codes):
        raise SystemExit("the run over two hosts has failed")


def rates(turns: int, scale: float) -> list[dict[str, Any]]:
    """Calls a second of each kind: the median of several turns, in each of which all sides run."""
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(turns):
        for side in SIDES:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "rates.json"
                if side == "farspan":
                    farspan("calls.py", out, str(scale), roles=("server=1", "caller=4"))
                elif side == "farspan by TCP":
                    farspan_on_hosts("calls.py", out, str(scale))
                else:
                    rpc(out, scale)
                for name, rate in json.loads(out.read_text()).items():
                    found.setdefault((name, side), []).append(rate)
    return [
        {
            "what": name,
            "side": side,
            "calls_per_s": round(statistics.median(values)),
            "least": round(min(values)),
            "most": round(max(values)),
        }
        for (name, side), values in found.items()
    ]


def rpc(out: Path, scale: float) -> None:
    """The same calls by torch.distributed.rpc."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "rpc_calls.py"), str(out), str(scale), str(rank), f"{folder}/store"],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stderr=subprocess.DEVNULL,
            )
            for rank in range(5)
        ]
        for process in processes:
            process.wait(TIMEOUT_S)


def kills(number: int) -> list[dict[str, Any]]:
    """For each kill: when the caller knew, when the launcher said so, when the next one was called."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kills.json"
        said = farspan("kills.py", out, str(number), roles=("actor=2", "learner=1"), restarts=number)
        rows: list[dict[str, Any]] = json.loads(out.read_text())
    lines = [when for when, line in said if "actor 0 was killed by SIGKILL" in line]
    assert len(lines) == len(rows) == number
    for row, when in zip(rows, lines, strict=True):
        died = row.pop("died")
        row |= {"what": "kill", "launcher_s": round(when - died, 4)}
        row |= {name: round(row.pop(key) - died, 4) for key, name in (("error", "caller_s"), ("back", "again_s"))}
    return rows


def main() -> None:
    args = arguments(__doc__).parse_args()
    rate_rows = rates(1 if args.quick else 5, 0.2 if args.quick else 1.0)
    by_name = {(row["what"], row["side"]): row for row in rate_rows}
    print(f"{'calls a second':<28s}" + "".join(f"{side:>26s}" for side in SIDES) + f"{'ratio to rpc':>14s}")
    for name in dict.fromkeys(row["what"] for row in rate_rows):
        rows = [by_name[name, side] for side in SIDES]
        shown = [f"{row['calls_per_s']} ({row['least']} to {row['most']})" for row in rows]
        ratio = rows[0]["calls_per_s"] / rows[-1]["calls_per_s"]
        print(f"{name:<28s}" + "".join(f"{text:>26s}" for text in shown) + f"{ratio:>14.2f}")
    kill_rows = kills(3 if args.quick else 20)
    print(f"{'noticed after a kill':<28s}{'median':>10s}{'worst':>10s}")
    for key in ("caller_s", "launcher_s", "again_s"):
        values = [row[key] for row in kill_rows]
        print(f"{key:<28s}{statistics.median(values):>8.3f} s{max(values):>8.3f} s")
    rate = by_name["one caller, futures", "farspan"]["calls_per_s"]
    worst = max(max(row["caller_s"], row["launcher_s"]) for row in kill_rows)
    finish(
        args,
        rows=[*rate_rows, *kill_rows],
        figure=f"{rate} calls a second, bar {LEAST_CALLS_PER_S}; a killed actor noticed in {worst:.3f} s at worst, "
        f"bar {MOST_NOTICED_S:g} s",
        holds=rate >= LEAST_CALLS_PER_S and worst <= MOST_NOTICED_S,
    )


if __name__ == "__main__":
    main()

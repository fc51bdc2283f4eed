"""What the agreement of a step costs rank 0, in worlds of up to 1,024 ranks without torch, over loopback sockets."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402

_WORLD = str(Path(__file__).with_name("world.py"))
_BAR_S = 3e-3
_SIZES = (2, 8, 32, 64, 256, 1_024)
_MANY = 1_000
"""From so many ranks on they also agree on the names of a large model."""
_QUICK_SIZES = (8, 64, 1_024)
_LONGEST_S = 600.0


def measure(num_ranks: int, num_steps: int, others: str, *, names: bool = False) -> dict[str, Any]:
    """Steps of one world: the root's processor time and bytes, and the time on the wall, a step.

    Args:
        num_ranks: Of the world.
        num_steps: That are timed.
        others: What all ranks but 0 are: a "crowd" or "light" (`world.py`).
        names: Whether they also agree on the names of a large model.
    """
    words = {"num_ranks": num_ranks, "num_steps": num_steps, "num_first": 3, "names": names}
    with contextlib.ExitStack() as processes:
        root = _start("root", words, processes)
        words["address"] = _hear(root)["address"]
        crowd = _start(others, words, processes)
        _hear(crowd)
        _go_on(root)
        _go_on(crowd)
        row = _hear(root)
        _hear(crowd)
        _go_on(crowd)
        for process in (root, crowd):
            process.wait(_LONGEST_S)
    return {"num_ranks": num_ranks, "others": others, "num_steps": num_steps, **row}


def _start(role: str, words: dict[str, Any], processes: contextlib.ExitStack) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, _WORLD, role, json.dumps(words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    processes.callback(process.kill)
    return process


def _go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of this world ended with {process.wait()}")
    return json.loads(line)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", help="other sizes of the world")
    parser.add_argument("--steps", type=int, help="how many are timed")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for others in ("crowd", "light"):
        for num_ranks in args.ranks or (_QUICK_SIZES if args.quick else _SIZES):
            most = {"crowd": 4_000, "light": 20_000}[others] // (10 if args.quick else 1)
            names = others == "crowd" and num_ranks >= _MANY
            num_steps = args.steps or max(10, min(500, most // num_ranks))
            row = measure(num_ranks, num_steps, others, names=names)
            rows.append(row)
            cost = f"{row['busy_s'] * 1e3:8.2f} ms of processor and {row['bytes'] / 1e3:10,.1f} kB a step at the root"
            print(f"{others} of {num_ranks:6,d} ranks: {cost}, {row['wall_s'] * 1e3:8.2f} ms on the wall", flush=True)
            if names:
                equal, different = f"{row['equal_s']:.1f} s", f"{row['different_s']:.1f} s"
                print(f"{'':15}names of {row['text_bytes'] / 1e6:.1f} MB: agreed in {equal}, difference in {different}")
    last = rows[-1]
    figure = (
        f"{last['num_ranks']:,} ranks: {last['busy_s'] * 1e3:.2f} ms, {last['bytes'] / 1e6:.2f} MB a step at the root"
    )
    finish(args, rows=rows, figure=f"{figure} (bar {_BAR_S * 1e3:g} ms)", holds=last["busy_s"] <= _BAR_S)


if __name__ == "__main__":
    main()

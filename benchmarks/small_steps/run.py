"""Small steps: what farspan costs where there is nothing to win.

one process    the same program in two processes, with and without farspan.distribute. They take turns of a few steps;
               compared is the time on the processor, so that what else runs on the machine does not count.
two ranks      the MLP over two processes, with its plain process and a bare exchange of the same messages (activation,
               gradient, two small gathers) over the same transports taking turns with it; compared is the time that
               passes. What is above the sum of these two is farspan's.
generation     one token each, after the first hundred; every token makes the text longer, so no call is like another.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from benchmarks.common import arguments, finish, micros  # noqa: E402
from programs import PROGRAMS, RUNS_OF_MESSAGES  # noqa: E402

TWO_RANKS_BAR_S = 1.5e-3
BARS = {"mlp": 1.3, "tiny": 1.03, "nanogpt": 1.03, "demo": 1.03, "whole": 1.5, "cached": 1.5}
STEPS = {"mlp": 40, "tiny": 8, "nanogpt": 4, "demo": 1, "whole": 12, "cached": 12}
"""In a turn."""
WARM_UP = {"mlp": 40, "tiny": 10, "nanogpt": 5, "demo": 3, "whole": 100, "cached": 100}
"""Steps before the first turn; a text has its first hundred tokens then."""


# In the workers.


def worker(mode: str, name: str) -> None:
    """Take as many steps as each line of the standard input says ("12", or "bare 12"); answer with their times."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    answers = os.dup(1)
    os.dup2(2, 1)  # what the program prints is not an answer
    bare: Callable[[], None] | None = None
    if mode == "plain":
        step = PROGRAMS[name](lambda model: model)
    else:
        import farspan

        step = PROGRAMS[name](farspan.distribute if mode == "alone" else halves)
        bare = None if mode == "alone" else bare_exchange(name)
    for line in sys.stdin:
        words = line.split()
        run = step if words[0] != "bare" else bare
        assert run is not None
        times: list[tuple[float, float]] = []
        for _ in range(int(words[-1])):
            began, began_cpu = time.perf_counter(), time.process_time()
            run()
            times.append((time.perf_counter() - began, time.process_time() - began_cpu))
        os.write(answers, (json.dumps(times) + "\n").encode())


def halves(model: Any) -> Any:
    """The first half of the layers on one rank, the second on the other."""
    import farspan

    blocks = [name for name, _ in model.named_children()]
    if len(blocks) < 3:
        return farspan.distribute(model, measure=False)
    half = (len(blocks) + 1) // 2
    return farspan.distribute(model, plan={name: f"rank:{int(i >= half)}" for i, name in enumerate(blocks)})


def bare_exchange(name: str) -> Callable[[], None]:
    """The messages of one step, with nothing around them."""
    from farspan.execute.process.world import current_engine

    engine = current_engine()
    assert engine is not None
    engine.recorder.is_recording = True
    side, rank = engine.side, engine.rank
    transport = engine.channels.transport_to(1 - rank, is_between_gpus=False)
    num_floats = RUNS_OF_MESSAGES[name]
    number = 0

    def exchange() -> None:
        nonlocal number
        number += 1
        keys = [f"bare {number} {which}" for which in ("begin", "end")]
        side.contribute(keys[0], bytes(16))
        for sender in range(2 if name == "mlp" else 1):  # forward, then the gradient back
            tensor = torch.empty(num_floats)
            if rank == sender:
                transport.send(tensor, 1 - rank, sender)
            else:
                transport.receive(tensor, 1 - rank, sender).wait(60.0)
        side.gathered(keys[0], 60.0)
        side.contribute(keys[1], bytes(32))
        side.gathered(keys[1], 60.0)
        for key in keys:
            side.forget(key)

    return exchange


# In the one that asks them.


class World:
    """Processes that run one program together."""

    def __init__(self, mode: str, name: str) -> None:
        num_ranks = 2 if mode == "two" else 1
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", f"{mode}:{name}"],
                env={**os.environ, **_variables(rank, num_ranks, port)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]

    def run(self, words: str) -> list[tuple[float, float]]:
        """The seconds that passed, and those on the processor, of each step; of the slowest rank."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(words + "\n")
            process.stdin.flush()
        lines = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        if not all(lines):
            raise RuntimeError(f"a worker ended with {[process.poll() for process in self.processes]}")
        return [max(step) for step in zip(*map(json.loads, lines), strict=True)]

    def close(self) -> None:
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    found = {"OMP_NUM_THREADS": "1", "FARSPAN_FILES": "all", "FARSPAN_MEASURE": "0"}
    # Else it is luck how often memory goes back to the system and comes again: up to a quarter of the MLP's step.
    found |= {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
    if num_ranks > 1:
        found |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return found


def one_process(name: str, num_turns: int) -> dict[str, Any]:
    worlds = {mode: World(mode, name) for mode in ("plain", "alone")}
    times = _in_turns(worlds, {mode: (mode, "{}") for mode in worlds}, name, num_turns)
    medians = {mode: median(cpu for _, cpu in steps) for mode, steps in times.items()}
    ratio = medians["alone"] / medians["plain"]
    row = {"part": "one process", "program": name, "ratio": ratio, "bar": BARS[name], "holds": ratio <= BARS[name]}
    row |= {f"{mode}_s": value for mode, value in medians.items()}
    print(f"{name:8s} plain {micros(row['plain_s']):>11}  farspan {micros(row['alone_s']):>11}  {ratio:6.3f} x")
    return row


def two_ranks(name: str, num_turns: int) -> dict[str, Any]:
    worlds = {mode: World(mode, name) for mode in ("plain", "two")}
    lines = {"plain": ("plain", "{}"), "two": ("two", "{}"), "bare": ("two", "bare {}")}
    times = _in_turns(worlds, lines, name, num_turns)
    medians = {mode: median(passed for passed, _ in steps) for mode, steps in times.items()}
    above_s = medians["two"] - medians["plain"] - medians["bare"]
    row = {"part": "two ranks", "program": name, "above_s": above_s, "holds": above_s <= TWO_RANKS_BAR_S}
    row |= {f"{mode}_s": value for mode, value in medians.items()}
    parts = "  ".join(f"{mode} {micros(value):>10}" for mode, value in medians.items())
    print(f"{name:8s} {parts}  above both {micros(above_s):>10}")
    return row


def _in_turns(
    worlds: dict[str, World], lines: dict[str, tuple[str, str]], name: str, num_turns: int
) -> dict[str, list[tuple[float, float]]]:
    times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in lines}
    try:
        for world, words in lines.values():
            worlds[world].run(words.format(WARM_UP[name]))
        for turn in range(num_turns):
            order = list(lines)[:: 1 if turn % 2 == 0 else -1]
            for mode in order:
                world, words = lines[mode]
                times[mode] += worlds[world].run(words.format(STEPS[name]))
    finally:
        for world in worlds.values():
            world.close()
    return times


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, help="of each side; 16, or 4 with --quick")
    parser.add_argument("--only", nargs="+", choices=[*BARS, "two"], help="programs; all")
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker.split(":"))
        return
    num_turns = args.turns or (4 if args.quick else 16)
    names = args.only or [*BARS, "two"]
    print("one process, time on the processor of a step or token")
    rows = [one_process(name, num_turns) for name in BARS if name in names]
    if "two" in names:
        print("two ranks, time of a step or token; what the messages cost is `bare`")
        rows.append(two_ranks("mlp", num_turns))
        if not args.quick:  # these have no bar
            others = [two_ranks(name, num_turns) for name in ("whole", "cached")]
            rows += [{**row, "holds": True} for row in others]
    parts = [f"{row['program']} {row['ratio']:.3f} x" for row in rows if "ratio" in row]
    parts += [
        f"two ranks {row['above_s'] * 1e3:.2f} ms above" for row in rows if row["program"] == "mlp" and "above_s" in row
    ]
    finish(args, rows=rows, figure="farspan / plain: " + ", ".join(parts), holds=all(row["holds"] for row in rows))


if __name__ == "__main__":
    main()

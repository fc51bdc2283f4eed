"""Whether a program that is killed and resumed ends where it would have ended: losses and final state, bit for bit.

    reference    the program in one process, never ended
    a trial      started over 1 to 3 processes; killed at a random moment after its first step, all processes or one of
                 them (the others then end by themselves); started again over another number; at last it may end
    a control    stopped in the middle, and resumed without one part of what was saved: must end elsewhere

The program saves in each step without waiting, so many moments are in the middle of a save.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from benchmarks.common import arguments, finish  # noqa: E402
from benchmarks.exact_resume.program import CONTROLS, run  # noqa: E402

KILLS_OF_A_TRIAL = 10
LONGEST_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """How the program is set up."""

    steps: int
    seed: int | None = None
    workers: int = 0


@dataclass(kw_only=True)
class Started:
    """The processes of one start."""

    pids: list[int]
    pipe: int
    result: Path
    errors: Path


def start(folder: Path, case: Case, num_ranks: int, *, control: str = "", stop: int = 0) -> Started:
    """Start the program; each rank is a fork of this process, which has no threads.

    Args:
        folder: Of the checkpoints.
        case: How.
        num_ranks: How many processes.
        control: What is left out.
        stop: After which step rank 0 ends the program; 0 for not at all.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    reading, writing = os.pipe()
    started = Started(pids=[], pipe=reading, result=folder / "result.json", errors=folder / "errors")
    started.result.unlink(missing_ok=True)
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)})
            os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FARSPAN_FILES": "all"})
            errors = os.open(started.errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(errors, 2)
            _be_rank(folder, case, rank, writing, started.result, control, stop)
        started.pids.append(pid)
    os.close(writing)
    return started


def _be_rank(folder: Path, case: Case, rank: int, pipe: int, result: Path, control: str, stop: int) -> None:
    """Never returns: the interpreter ends as that of any program."""

    def on_step(step: int) -> None:
        if rank == 0:
            os.write(pipe, b".")
        if step == stop:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    found = run(
        folder / "checkpoints", case.steps, seed=case.seed, workers=case.workers, control=control, on_step=on_step
    )
    if rank == 0:
        result.write_text(json.dumps(found))
    sys.exit(0)


def wait_all(started: Started, longest_s: float = LONGEST_S) -> list[int]:
    """How each process ended; those that have not ended in time are killed, and count as -1."""
    end = time.monotonic() + longest_s
    codes: list[int] = []
    for pid in started.pids:
        descriptor = os.pidfd_open(pid)
        has_ended = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]
        os.close(descriptor)
        if not has_ended:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        codes.append(code if has_ended else -1)
    os.close(started.pipe)
    return codes


def kill_at_random(started: Started, chance: random.Random, longest_s: float) -> str:
    """Kill all processes, or one, at a moment after the first step; which, or "" where the program was faster."""
    if not os.read(started.pipe, 1):
        return ""
    select.select([], [], [], chance.uniform(0, longest_s))
    victims = started.pids if chance.random() < 0.5 else [chance.choice(started.pids)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    return "all" if len(victims) == len(started.pids) else "one"


def reference(folder: Path, case: Case) -> Any:
    started = start(folder, case, 1)
    assert wait_all(started) == [0], started.errors.read_text()
    return json.loads(started.result.read_text())


def trial(folder: Path, case: Case, chance: random.Random, num_kills: int, expected: Any, longest_s: float) -> Any:
    """Kill and resume; what happened."""
    kinds: list[str] = []
    ranks: list[int] = []
    num_in_save = 0
    began = time.monotonic()
    while True:
        num_ranks = chance.choice([1, 2, 3])
        started = start(folder, case, num_ranks)
        if len(kinds) < num_kills:
            kind = kill_at_random(started, chance, longest_s)
            codes = wait_all(started)
            if kind:
                ranks.append(num_ranks)
                kinds.append(kind)
                num_in_save += any(".tmp-" in path.name for path in (folder / "checkpoints").iterdir())
            if -1 in codes:
                return {"right": False, "why": f"processes hang: {codes}", "kills": len(kinds)}
            if not kind or not any(codes):  # it was faster than the kill: from the start
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            continue
        codes = wait_all(started)
        if any(codes):
            why = started.errors.read_text()[-600:]
            return {"right": False, "why": f"ended with {codes}: {why}", "kills": len(kinds)}
        found = json.loads(started.result.read_text())
        is_right = found == expected
        row = {"right": is_right, "kills": len(kinds), "kinds": kinds, "ranks": [*ranks, num_ranks]}
        return row | {"in_save": num_in_save, "duration_s": time.monotonic() - began}


def control(folder: Path, case: Case, left_out: str, expected: Any) -> Any:
    """Stop in the middle, and resume without a part; "" leaves out nothing."""
    middle = case.steps // 2 + 1
    wait_all(start(folder, case, 1, stop=middle))
    started = start(folder, case, 1, control=left_out)
    codes = wait_all(started)
    assert codes == [0], started.errors.read_text()
    found = json.loads(started.result.read_text())
    return {"control": left_out, "losses": found["losses"] == expected["losses"], "state": found == expected}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    num_kills = 5 if args.quick else args.kills
    chance = random.Random(args.seed)
    top, process = Path(tempfile.mkdtemp()), os.getpid()
    rows: list[dict[str, Any]] = []
    try:
        cases = [Case(steps=20), Case(steps=20, seed=3), Case(steps=20, workers=2)]
        expected: list[Any] = []
        for number, case in enumerate(cases):
            (folder := top / f"reference {number}").mkdir()
            expected.append(reference(folder, case))
        done = 0
        while done < num_kills:
            number = len(rows) % len(cases)
            (folder := top / f"trial {len(rows)}").mkdir()
            kills = min(KILLS_OF_A_TRIAL, num_kills - done)
            row = trial(folder, cases[number], chance, kills, expected[number], 0.5)
            rows.append({"case": vars(cases[number])} | row)
            done += row["kills"]
            print(json.dumps(rows[-1]), flush=True)
            shutil.rmtree(folder)
        for left_out in ("", *CONTROLS):
            number = 1 if left_out in ("counts of calls", "") else 0
            (folder := top / f"control {left_out}").mkdir()
            rows.append(control(folder, cases[number], left_out, expected[number]))
            print(json.dumps(rows[-1]), flush=True)
    finally:
        if os.getpid() == process:
            shutil.rmtree(top, ignore_errors=True)
    trials = [row for row in rows if "kills" in row]
    controls = [row for row in rows if row.get("control")]
    right = sum(row["right"] for row in trials)
    caught = sum(not row["state"] for row in controls)
    is_quiet = all(row["state"] for row in rows if row.get("control") == "")
    in_save = sum(row.get("in_save", 0) for row in trials)
    figure = (
        f"{sum(row['kills'] for row in trials)} kills, {in_save} of them in a save: {right} of {len(trials)} runs end "
        f"bit for bit as never killed; {caught} of {len(controls)} controls are caught"
    )
    holds = right == len(trials) and caught == len(controls) and is_quiet
    finish(args, rows=rows, figure=figure, holds=holds)


if __name__ == "__main__":
    main()

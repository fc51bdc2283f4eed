"""A stranger on the same machine attacks the ports of a training: nothing of the training changes.

The same training runs undisturbed and attacked: its losses and last weights, to the last bit, the resident memory of
every rank, and the time of a step are compared. The hub of farspan's side channel is what the bar is about; gloo's
listeners and torch's TCPStore are attacked in runs of their own, which are reported and do not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402
from benchmarks.hostile.watch import rank_processes, resident_mib  # noqa: E402

HERE = Path(__file__).parent
MEMORY_BAR_MIB = 16.0
TIME_BAR = 1.5
NUM_FRAMES, NUM_QUICK = 10_000, 1_000
"""How many messages must have been sent; the second in the quick version."""
TARGETS = {"run": ("hub", "gloo"), "env": ("hub", "gloo", "store")}
_VARIABLE = {"run": "FARSPAN_RANK", "env": "RANK"}
_LONGEST_S = 300.0
_FIRST_STEPS = 50
"""Which are not timed, and before which no memory is noted."""
_NICE = 10
"""The stranger's: it is to send, not to keep the ranks from their cores."""
_NO_FRAMES = ("single bytes", "floods")
"""What the stranger also does, and what does not count."""


@dataclass(slots=True, kw_only=True)
class Training:
    """What was seen of one run.

    Attributes:
        codes: Exit codes of its processes: of the launcher, or of each rank.
        lines: What rank 0 has printed.
        step_s: The mean time of a step after the first ones.
        resident_mib: The most of each rank.
        error_bytes: How much was written to standard error.
        outsider: What the stranger says that it has done.
    """

    codes: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    step_s: float = 0.0
    resident_mib: dict[int, float] = field(default_factory=dict)
    error_bytes: int = 0
    last_words: str = ""
    outsider: dict[str, Any] = field(default_factory=dict)


def train(launcher: str, num_ranks: int, num_steps: int, *, target: str | None, seed: int) -> Training:
    """Run the training once, attacked if there is a target."""
    mark, port = secrets.token_hex(8), _free_port()
    seen = Training()
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder, Path(folder, "err").open("wb") as err:
        with _outsider(target, num_ranks, port if launcher == "env" else 0, seed) as outsider:
            processes = _start(launcher, num_ranks, num_steps, mark, port, folder, err)
            try:
                _watch(seen, processes, mark, launcher, num_ranks, outsider)
            finally:
                for process in processes:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
            seen.codes = [process.returncode for process in processes]
            if outsider is not None:
                out, _ = outsider.communicate(timeout=60.0)
                seen.outsider = json.loads(out.splitlines()[-1])
        said = Path(folder, "err").read_text(errors="replace")
    seen.error_bytes, seen.last_words = len(said), said[-2000:]
    return seen


@contextlib.contextmanager
def _outsider(target: str | None, num_ranks: int, store_port: int, seed: int) -> Iterator[subprocess.Popen[str] | None]:
    """The stranger, who knows nothing of the run but what the system shows."""
    if target is None:
        yield None
        return
    words = {"target": target, "world_size": num_ranks, "store_port": store_port, "seed": seed}
    command = ["nice", "-n", str(_NICE), sys.executable, str(HERE / "outsider.py"), json.dumps(words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def _start(
    launcher: str, num_ranks: int, num_steps: int, mark: str, port: int, folder: str, err: Any
) -> list[subprocess.Popen[str]]:
    given = {name: text for name, text in os.environ.items() if not name.startswith("FARSPAN_")}
    given |= {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": folder,
        "HOSTILE_MARK": mark,
        "PYTHONUNBUFFERED": "1",
    }
    script = [str(HERE / "train.py"), str(num_steps)]
    if launcher == "run":
        words = ["-m", "farspan", "run", "-n", str(num_ranks), "--log-dir", folder]
        return [_popen([sys.executable, *words, *script], given, err)]
    given |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    given["FARSPAN_SECRET"] = secrets.token_hex(16)  # or the store would tell it to everybody who asks
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    return [_popen([sys.executable, *script], given | place, err) for place in places]


def _popen(command: list[str], environment: dict[str, str], err: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=err,
        text=True,
        start_new_session=True,
    )


def _watch(
    seen: Training,
    processes: list[subprocess.Popen[str]],
    mark: str,
    launcher: str,
    num_ranks: int,
    outsider: subprocess.Popen[str] | None,
) -> None:
    """Read what rank 0 prints, as it comes, and note times and memory; set the stranger on when training has begun."""
    stop = threading.Timer(_LONGEST_S, lambda: [os.killpg(each.pid, signal.SIGKILL) for each in processes])
    stop.start()
    over, pids = threading.Event(), dict[int, int]()

    def sample() -> None:
        while not over.wait(0.2):
            for rank, pid in pids.items():
                seen.resident_mib[rank] = max(seen.resident_mib.get(rank, 0.0), resident_mib(pid))

    sampling = threading.Thread(target=sample, daemon=True)
    sampling.start()
    times: list[float] = []
    try:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            seen.lines.append(line.rstrip())
            times.append(time.monotonic())
            if len(times) == _FIRST_STEPS:
                pids.update(rank_processes(mark, _VARIABLE[launcher]))
                if outsider is not None and outsider.stdin is not None:
                    outsider.stdin.write(json.dumps(list(pids.values())) + "\n")
                    outsider.stdin.flush()
            if line.startswith("weights") and outsider is not None and outsider.stdin is not None:
                outsider.stdin.close()  # what listens is about to end
                outsider.stdin = None
        for process in processes:
            process.wait(60.0)
    finally:
        stop.cancel()
        over.set()
        sampling.join()
    steps = times[_FIRST_STEPS:-1]
    if len(steps) > 1:
        seen.step_s = (steps[-1] - steps[0]) / (len(steps) - 1)


def _free_port() -> int:
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        try:
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", port))
        except OSError:
            continue
        return port


def compare(
    launcher: str, num_ranks: int, target: str, calm: Training, attacked: Training, num_frames: int
) -> dict[str, Any]:
    """One row: what the attack has changed."""
    more = {rank: mib - calm.resident_mib.get(rank, 0.0) for rank, mib in attacked.resident_mib.items()}
    sent = attacked.outsider.get("sent", {})
    row = {
        "launcher": launcher,
        "ranks": num_ranks,
        "target": target,
        "ports": sorted(attacked.outsider.get("roles", {}).values()),
        "sent": sum(number for name, number in sent.items() if name not in _NO_FRAMES),
        "sent_by_kind": sent,
        "overheard": attacked.outsider.get("overheard", 0),
        "welcomes": attacked.outsider.get("welcomes", 0),
        "refused": attacked.outsider.get("refused", {}),
        "codes": attacked.codes,
        "same": attacked.lines == calm.lines and len(calm.lines) > _FIRST_STEPS,
        "more_mib": round(max(more.values(), default=float("inf")), 2),
        "step_ms": [round(1e3 * calm.step_s, 2), round(1e3 * attacked.step_s, 2)],
        "slower": round(attacked.step_s / calm.step_s, 3) if calm.step_s else float("inf"),
        "error_bytes": attacked.error_bytes,
        "last_words": "" if not any(attacked.codes) else attacked.last_words,
    }
    row["holds"] = (
        not any(attacked.codes)
        and row["same"]
        and row["welcomes"] == 0
        and row["more_mib"] <= MEMORY_BAR_MIB
        and row["slower"] <= TIME_BAR
        and row["sent"] >= num_frames
    )
    return row


def show(row: dict[str, Any]) -> None:
    """A line for a run under attack, and a second one for what it has changed."""
    same = "same bits" if row["same"] else "OTHER RESULTS"
    before, after = row["step_ms"]
    print(
        f"{row['launcher']:<5s}{row['ranks']} ranks  {row['target']:<6s}{row['sent']:>7d} sent, "
        f"errors {row['refused']}, {row['overheard']} hellos overheard, {row['welcomes']} let in"
    )
    print(
        f"     exit codes {row['codes']}, {same}, {row['more_mib']:+.1f} MiB, step x {row['slower']:.2f} "
        f"({before} to {after} ms), {row['error_bytes']} bytes on standard error",
        flush=True,
    )
    if row["last_words"]:
        print("    " + row["last_words"].replace("\n", "\n    "), flush=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="of the training")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3], metavar="N", help="how many")
    parser.add_argument("--launcher", action="append", choices=list(TARGETS), help="only under this one")
    parser.add_argument("--target", action="append", choices=["hub", "gloo", "store"], help="only these ports")
    parser.add_argument("--seed", type=int, default=0, help="of what is sent")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    num_steps, num_frames = (1000, NUM_QUICK) if args.quick else (args.steps, NUM_FRAMES)
    for launcher in args.launcher or ["run", "env"]:
        for num_ranks in [2] if args.quick else args.ranks:
            calm = train(launcher, num_ranks, num_steps, target=None, seed=0)
            for target in [each for each in TARGETS[launcher] if each in (args.target or TARGETS[launcher])]:
                if args.quick and (launcher, target) != ("run", "hub"):
                    continue
                attacked = train(launcher, num_ranks, num_steps, target=target, seed=args.seed)
                rows.append(compare(launcher, num_ranks, target, calm, attacked, num_frames))
                show(rows[-1])
    counted = [row for row in rows if row["target"] == "hub"]
    figure = (
        f"{sum(row['sent'] for row in counted)} messages of strangers to the hub in {len(counted)} trainings: "
        f"{sum(row['holds'] for row in counted)} unharmed, "
        f"most memory {max((row['more_mib'] for row in counted), default=0.0):+.1f} MiB, "
        f"longest step x {max((row['slower'] for row in counted), default=0.0):.2f}"
    )
    finish(args, rows=rows, figure=figure, holds=all(row["holds"] for row in counted))


if __name__ == "__main__":
    main()

"""Whether one run over three hosts goes on when a host is lost, and takes in one that comes, with the same numbers.

    farspan run -n 1 --nnodes 1:4 --node-rank 0 --max-restarts 4 --join HOST:PORT train.py      on the first host
    farspan run -n 1 --join HOST:PORT train.py                                                  on two others
        all processes of the third host are killed (or, with --cut, its link is); a fourth host comes later

With --by-ssh the first host starts the two others, by a script in the place of ssh, and the third one comes back:

    farspan run --hosts localhost,B,C --nnodes 1:3 --max-restarts 4 --ssh SCRIPT train.py

With --sshd COMMAND, which serves ssh in the foreground, it runs on those two, and --ssh COMMAND is what reaches it.

Hosts are network namespaces. The program is that of exact_resume, and saves in each step. A time is that from the loss
to the next step done by those that are left, and from the start of the launcher on the fourth host to the next step in
which it takes part.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402
from benchmarks.recovery.run import HERE, LONGEST_S, PAUSE_S, Run, start  # noqa: E402
from benchmarks.slow_links.hosts import Hosts, hosts, why_not  # noqa: E402

NUM_HOSTS = 3
"""With which the run begins; then one is lost, and one comes."""
LAYERS = ("disk", "memory")
LINK_BYTES_PER_S = 125e6
SSH = """#!/bin/sh
if [ -e "{folder}/away-$1" ]; then echo "$1 is down" >&2; exit 255; fi
exec ip netns exec "$(cat "{folder}/name-$1")" sh -c "$2"
"""
STEPS_BETWEEN = 10
"""Steps that are taken before the loss, and between it and the start of the fourth host, at least."""


class Launchers:
    """One on each host, and what their ranks have said."""

    def __init__(self, made: Hosts, layer: str, folder: Path, args: argparse.Namespace) -> None:
        steps = args.steps
        self.made = made
        self.by_ssh = args.by_ssh
        self.ssh: str = args.ssh
        self.sshd: list[str] = shlex.split(args.sshd)
        self.servers: dict[int, subprocess.Popen[bytes]] = {}
        self.folder = folder
        pipe = folder / "pipe"
        os.mkfifo(pipe)
        self.words = [str(HERE / "train.py"), str(folder), str(pipe), str(steps), str(PAUSE_S)]
        self.words += ["memory"] if layer == "memory" else []
        for number in range(1, NUM_HOSTS):
            self.serve(number)
        opened = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.run = Run(process=self.start(), pipe=opened)

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the launcher of the next host."""
        number = len(self.processes)
        command = [*self.made.command(number), sys.executable, "-m", "farspan", "run"]
        if self.by_ssh:
            others = ",".join(self.made.addresses[1:NUM_HOSTS])
            command += ["--hosts", f"localhost,{others}", "--nnodes", f"1:{NUM_HOSTS}", "--ssh"]
            command += [self.ssh or self.make_ssh()]
        else:
            command += ["-n", "1", "--join", f"{self.made.addresses[0]}:29400"]
            command += ["--nnodes", f"1:{NUM_HOSTS + 1}", "--node-rank", "0"] if number == 0 else []
        command += ["--max-restarts", "4"] if number == 0 else []
        command += ["--files", "all", "--log-dir", str(self.folder / "logs"), *self.words]
        variables = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        variables |= {"FARSPAN_SECRET": "known to all hosts"}
        variables.pop("FARSPAN_RECORD", None)
        with self.output(number).open("wb") as output:
            process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self.processes.append(process)
        return process

    def output(self, number: int) -> Path:
        return self.folder / f"output{number}"

    def lose(self, number: int, *, cut: bool) -> None:
        """Kill all processes of a host at once, or cut its link."""
        name = self.made.names[number]
        (self.folder / f"away-{self.made.addresses[number]}").touch()
        if cut:
            subprocess.run(["ip", "-n", name, "link", "set", "eth0", "down"], check=True)
            return
        for pid in _processes_on(name):
            os.kill(pid, signal.SIGKILL)

    def serve(self, number: int) -> None:
        """Starts a server of ssh on a host, where one was given and none runs."""
        server = self.servers.get(number)
        if self.sshd and (server is None or server.poll() is not None):
            self.servers[number] = subprocess.Popen([*self.made.command(number), *self.sshd])

    def bring(self) -> None:
        """Starts the launcher of the fourth host, or lets the third one be reached again."""
        if not self.by_ssh:
            self.start()
            return
        subprocess.run(["ip", "-n", self.made.names[NUM_HOSTS - 1], "link", "set", "eth0", "up"], check=True)
        (self.folder / f"away-{self.made.addresses[NUM_HOSTS - 1]}").unlink()
        self.serve(NUM_HOSTS - 1)

    def make_ssh(self) -> str:
        """Writes the script in the place of ssh; returns its path."""
        for name, address in zip(self.made.names, self.made.addresses, strict=True):
            (self.folder / f"name-{address}").write_text(name)
        file = self.folder / "ssh.sh"
        file.write_text(SSH.format(folder=self.folder))
        file.chmod(0o755)
        return str(file)

    def steps_of(self, num_ranks: int, after: int) -> list[tuple[int, int, float]]:
        """The steps of starts later than `after` with so many ranks: number of the start, step, time."""
        return [each for each in self.run.steps if each[0] > after and len(self.run.pids[each[0]]) == num_ranks]

    def wait_for(self, num_ranks: int, after: int, count: int = 1) -> bool:
        """Until a start later than `after`, with so many ranks, has taken so many steps."""
        return self.run.listen_until(lambda: len(self.steps_of(num_ranks, after)) >= count, LONGEST_S)

    def close(self) -> None:
        for name in self.made.names:
            for pid in _processes_on(name):
                os.kill(pid, signal.SIGKILL)
        for process in (*self.processes, *self.servers.values()):
            process.wait(60)
        os.close(self.run.pipe)


def _processes_on(name: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
    return [int(word) for word in found.stdout.split()]


def trial(layer: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One run; a row for the loss and one for the host that comes, as far as they came."""
    rows: list[dict[str, Any]] = []
    with hosts(NUM_HOSTS + 1, bytes_per_s=LINK_BYTES_PER_S) as made:
        launchers = Launchers(made, layer, folder, args)
        run = launchers.run
        try:
            for _ in range(0 if args.by_ssh else NUM_HOSTS - 1):
                launchers.start()
            if not launchers.wait_for(NUM_HOSTS, -1, STEPS_BETWEEN):
                return rows
            for what in ("loss", "arrival"):
                before, began = run.steps[-1], time.monotonic()
                if what == "loss":
                    launchers.lose(NUM_HOSTS - 1, cut=args.cut)
                else:
                    launchers.bring()
                num_ranks = NUM_HOSTS - 1 if what == "loss" else NUM_HOSTS
                row: dict[str, Any] = {"layer": layer, "what": what, "time_s": None, "ranks": num_ranks}
                rows.append(row)
                if not launchers.wait_for(num_ranks, before[0]):
                    return rows
                first = launchers.steps_of(num_ranks, before[0])[0]
                last = max((each for each in run.steps if each[0] < first[0]), key=lambda each: each[2])
                row["time_s"], row["still_s"] = first[2] - began, first[2] - last[2]
                row["steps again"] = last[1] + 1 - first[1]
                launchers.wait_for(num_ranks, before[0], STEPS_BETWEEN)
            run.listen_until(lambda: False, 10 * LONGEST_S)
            code = run.process.wait(60)
            return [{**row, "code": code} for row in rows]
        finally:
            launchers.close()
            for number in range(len(launchers.processes)):
                print(launchers.output(number).read_text()[-2500:], file=sys.stderr)


def describe(rows: list[dict[str, Any]], layer: str) -> str:
    """The times of both."""
    found = {row["what"]: row for row in rows if row["layer"] == layer and row["time_s"] is not None}
    parts = [
        f"{what} to next step {row['time_s']:.1f} s ({row['still_s']:.1f} s without a step, {row['steps again']} again)"
        for what, row in found.items()
    ]
    return f"{layer}: {', '.join(parts) or 'nothing'}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layer", choices=("all", *LAYERS), default="all", help="where farspan saves")
    parser.add_argument("--cut", action="store_true", help="cut the link of the host that is lost, and kill nothing")
    parser.add_argument(
        "--by-ssh", action="store_true", help="--hosts in the place of --join; the third host comes back"
    )
    parser.add_argument("--ssh", default="", help="with --by-ssh: what reaches a host (default: a script)")
    parser.add_argument("--sshd", default="", help="with --ssh: a server, in the foreground")
    parser.add_argument("--steps", type=int, default=400, help="of the whole run")
    args = parser.parse_args()
    if why := why_not():
        raise SystemExit(why)
    layers = LAYERS[:1] if args.quick else LAYERS if args.layer == "all" else (args.layer,)
    steps = args.steps = 200 if args.quick else args.steps
    top = Path(tempfile.mkdtemp())
    rows: list[dict[str, Any]] = []
    are_same: list[bool] = []
    try:
        for name in ("plain", *layers):
            (top / name).mkdir()
        plain = start("plain", top / "plain", steps, 0)
        plain.listen_until(lambda: False, 600.0)
        assert plain.process.wait(60) == 0, (top / "plain" / "output").read_text()
        expected = json.loads((top / "plain" / "result.json").read_text())
        for layer in layers:
            rows += trial(layer, top / layer, args)
            result = top / layer / "result.json"
            are_same.append(result.exists() and json.loads(result.read_text()) == expected)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    figure = "; ".join(describe(rows, layer) for layer in layers)
    figure += f"; {steps} losses and the final state {'equal' if all(are_same) else 'DIFFERENT'}"
    holds = len(rows) == 2 * len(layers) and all(row["time_s"] is not None for row in rows) and all(are_same)
    finish(args, rows=rows, figure=figure, holds=holds)


if __name__ == "__main__":
    main()

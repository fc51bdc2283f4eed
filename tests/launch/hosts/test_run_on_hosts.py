"""`farspan run --hosts`: hosts are network namespaces, and a script in the place of ssh goes into them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.hangs.hangs import SETUP, ended_in_time
from tests.launch.joining.hosts import ADDRESSES, Hosts, are_possible, two_hosts
from tests.support.launcher import SOURCE, wait_until

pytestmark = pytest.mark.skipif(not are_possible(), reason="needs root and network namespaces")

SSH = """#!/bin/sh
# HOST LINE: the hosts by their addresses
case $1 in {addresses[0]}) i=0;; {addresses[1]}) i=1;; *) echo "no route to $1" >&2; exit 255;; esac
exec ip netns exec {name}$i sh -c "$2"
"""
TRAINS = """
import os, sys, time, torch, farspan
from torch import nn
rank, start = int(os.environ["FARSPAN_RANK"]), os.environ.get("FARSPAN_RESTART", "0")
torch.manual_seed(0)
model = farspan.distribute(nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
if farspan.latest("checkpoints"):
    step = farspan.load("checkpoints", model=model, optimizer=optimizer).step
ranks = os.environ["FARSPAN_WORLD_SIZE"]
print("host", os.environ["FARSPAN_STORE"].rpartition(":")[0], os.environ["FARSPAN_LOCAL_RANK"], ranks, flush=True)
while step < int(sys.argv[1]):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    step += 1
    print("step", step, loss.item(), flush=True)
    memory = sys.argv[2:] == ["memory"]
    farspan.save("checkpoints", model=model, optimizer=optimizer, step=step, memory=memory).wait()
    while os.path.exists("wait") and step == 3: time.sleep(0.01)
"""


@pytest.fixture
def hosts():
    with two_hosts() as made:
        yield made


class Run:
    """A launcher on host 0."""

    def __init__(self, hosts: Hosts, folder: Path, script: str, *words: str, options: tuple[str, ...] = ()) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SETUP + script.lstrip())
        ssh = folder / "ssh.sh"
        ssh.write_text(SSH.format(addresses=ADDRESSES, name=hosts.name))
        ssh.chmod(0o755)
        command = ["ip", "netns", "exec", f"{hosts.name}0", sys.executable, "-m", "farspan", "run"]
        command += ["--ssh", str(ssh), "--log-dir", str(folder / "logs"), *options, "train.py", *words]
        variables = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "FARSPAN_DEADLINE": "60"}
        self.output = folder / "output"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                command, cwd=folder, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def end(self, limit_s: float = 100.0) -> tuple[int, str]:
        try:
            ended_in_time(self.process, limit_s, self.folder / "logs", self.output)
            return self.process.returncode, self.output.read_text()
        finally:
            self.process.kill()
            self.process.wait()


def steps(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("step")]


def test_ranks_of_two_unequal_hosts_train_as_those_of_one(hosts: Hosts, tmp_path: Path) -> None:
    run = Run(hosts, tmp_path, TRAINS, "3", options=("--hosts", f"localhost:1,{ADDRESSES[1]}:2"))
    code, output = run.end()
    assert code == 0 and len(steps(output)) == 3, output
    assert f"host tcp://{ADDRESSES[0]} 0 3" in output  # the address by which the other host is reached
    assert f"localhost has rank 0, {ADDRESSES[1]} has rank 1 to 2" in output
    for number, local in [(1, 0), (2, 1)]:
        log = (tmp_path / "logs" / f"rank{number}.log").read_text()
        assert steps(log) == steps(output) and f"host tcp://{ADDRESSES[0]} {local} 3" in log


def test_a_failure_on_another_host_is_shown_here_once(hosts: Hosts, tmp_path: Path) -> None:
    script = "import os\nif os.environ['FARSPAN_RANK'] == '0': raise ValueError('boom')\nprint('out')\n"
    options = ("--hosts", f"{ADDRESSES[1]}:2", "--max-restarts", "5")
    code, output = Run(hosts, tmp_path, script, options=options).end(30.0)
    assert code == 1 and "rank 0 of 2 failed: exit code 1.\n  why   ValueError: boom" in output, output
    assert "restart 1 of 5" in output and "the same error came twice in the same place" in output


@pytest.mark.parametrize("layer", ["disk", "memory"])
def test_a_host_that_is_lost_is_left_out_of_the_next_start(hosts: Hosts, tmp_path: Path, layer: str) -> None:
    (tmp_path / "wait").touch()
    options = ("--hosts", f"localhost:2,{ADDRESSES[1]}:1", "--nnodes", "1:2", "--max-restarts", "3")
    run = Run(hosts, tmp_path, TRAINS, "5", layer, options=options)
    wait_until(lambda: "step 3 " in run.output.read_text())
    killed_at = time.monotonic()
    agents = subprocess.run(["ip", "netns", "pids", f"{hosts.name}1"], capture_output=True, text=True, check=True)
    subprocess.run(["kill", "-9", *agents.stdout.split()], check=True)
    (tmp_path / "ssh.sh").write_text("#!/bin/sh\necho its power is off >&2\nexit 255\n")
    (tmp_path / "wait").unlink()
    code, output = run.end()
    assert code == 0, output
    assert time.monotonic() - killed_at < 60
    assert f"rank 2 of 3 failed: its host {ADDRESSES[1]} is lost" in output, output
    assert f"without {ADDRESSES[1]}: " in output and "its power is off" in output
    assert "localhost has rank 0 to 1;" in output and output.count("step 5 ") == 1
    assert re.search("restart 1 of 3; step [23] is saved", output) and len(set(steps(output))) == 5
    assert (tmp_path / "checkpoints").exists() == (layer == "disk")


def test_a_host_that_cannot_be_reached_is_an_error_in_three_parts(hosts: Hosts, tmp_path: Path) -> None:
    code, output = Run(hosts, tmp_path, "", options=("--hosts", "localhost:1,10.77.9.9:2")).end(30.0)
    assert code == 2
    assert "LaunchError: 10.77.9.9 cannot be reached.\n  why  no route to 10.77.9.9.\n  try  ssh 10.77.9.9" in output


def test_another_program_on_a_host_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    other = tmp_path / ".other"
    other.mkdir()
    (other / "train.py").write_text("print('another')\n")
    (tmp_path / "hosts.txt").write_text(f"localhost\n{ADDRESSES[1]} slots=2 folder={other} # comment\n")
    code, output = Run(hosts, tmp_path, "print()\n", options=("--hosts", "hosts.txt")).end(30.0)
    assert code == 2
    assert f"LaunchError: {ADDRESSES[1]} has another program.\n  why  train.py differs." in output, output
    assert f"{ADDRESSES[1]}:{other}/\n" in output


def test_a_signal_reaches_the_ranks_of_other_hosts(hosts: Hosts, tmp_path: Path) -> None:
    script = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (print('heard'), sys.exit(0)))\n"
    script += "print('ready', flush=True)\ntime.sleep(60)\n"
    run = Run(hosts, tmp_path, script, options=("--hosts", f"localhost,{ADDRESSES[1]}"))
    log = tmp_path / "logs" / "rank1.log"
    wait_until(lambda: "ready" in run.output.read_text() and log.exists() and "ready" in log.read_text())
    run.process.send_signal(signal.SIGTERM)
    code, output = run.end(30.0)
    assert code == 0 and "heard" in output and "heard" in log.read_text(), output


class Joined:
    """Launchers on both hosts: no ssh. The first is `--node-rank 0`, on host 0."""

    def __init__(self, hosts: Hosts, folder: Path, script: str, *words: str) -> None:
        self.hosts = hosts
        self.folder = folder
        self.words = words
        (folder / "train.py").write_text(SETUP + script.lstrip())
        self.outputs: list[Path] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, host: int, *options: str, secret: str = "known", deadline_s: int = 60) -> None:
        command = ["ip", "netns", "exec", f"{self.hosts.name}{host}", sys.executable, "-m", "farspan", "run", *options]
        command += ["--join", f"{ADDRESSES[0]}:29400", "--log-dir", str(self.folder / "logs"), "train.py", *self.words]
        variables = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "FARSPAN_SECRET": secret}
        variables |= {"FARSPAN_DEADLINE": str(deadline_s)}
        self.outputs.append(self.folder / f"output{len(self.outputs)}")
        with self.outputs[-1].open("wb") as file:
            self.processes.append(
                subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=os.environ | variables,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
            )

    def end(self, limit_s: float = 100.0) -> tuple[list[int], list[str]]:
        until = time.monotonic() + limit_s
        try:
            codes = [process.wait(max(0.0, until - time.monotonic())) for process in self.processes]
            return codes, [output.read_text() for output in self.outputs]
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(output.read_text() for output in self.outputs)) from None
        finally:
            for process in self.processes:
                process.kill()
                process.wait()


def test_hosts_that_join_train_as_those_that_are_started(hosts: Hosts, tmp_path: Path) -> None:
    run = Joined(hosts, tmp_path, TRAINS, "3")
    run.start(0, "-n", "1", "--nnodes", "2", "--node-rank", "0")
    run.start(1, "-n", "2")
    codes, outputs = run.end()
    assert codes == [0, 0], outputs
    assert len(steps(outputs[0])) == 3 and f"host tcp://{ADDRESSES[0]} 0 3" in outputs[0], outputs[0]
    log = (tmp_path / "logs" / "rank2.log").read_text()
    assert steps(log) == steps(outputs[0]) and "step" not in outputs[1]


COMES_AND_GOES = (
    TRAINS
    + """
    time.sleep(0.05)
    while start == "1" and step == 20:
        if os.path.exists("come"): os.kill(os.getpid(), 9)
        time.sleep(0.01)
"""
)


def test_a_host_that_is_cut_off_is_left_out_and_one_that_comes_is_taken_in(hosts: Hosts, tmp_path: Path) -> None:
    run = Joined(hosts, tmp_path, COMES_AND_GOES, "25")
    run.start(0, "-n", "1", "--nnodes", "1:2", "--node-rank", "0", "--max-restarts", "3")
    run.start(1, "-n", "1")
    wait_until(lambda: "step 5 " in run.outputs[0].read_text())
    hosts.cut(0, 1)
    wait_until(lambda: "restart 1 of 3" in run.outputs[0].read_text())
    hosts.mend(0, 1)
    run.start(1, "-n", "2")
    wait_until(lambda: run.outputs[0].read_text().count("has come") == 2)
    (tmp_path / "come").touch()
    codes, outputs = run.end()
    assert codes == [0, 1, 0], outputs
    assert "is lost: nothing has come from it for 10 s" in outputs[0], outputs[0]
    sizes = [line.split()[3] for line in outputs[0].splitlines() if line.startswith("host ")]
    assert sizes[0] == "2" and sizes[-2:] == ["1", "3"]  # between them the log of the lost rank is shown
    assert len({line.split()[1] for line in steps(outputs[0])}) == 25
    assert len(set(steps(outputs[0]))) == 25  # a step that was taken again has the loss that it had


def test_a_host_that_does_not_know_the_secret_is_not_let_in(hosts: Hosts, tmp_path: Path) -> None:
    run = Joined(hosts, tmp_path, "print('ran')\n")
    run.start(0, "-n", "1", "--nnodes", "2", "--node-rank", "0", deadline_s=3)
    run.start(1, "-n", "2", secret="wrong", deadline_s=3)
    codes, outputs = run.end(60.0)
    assert codes == [2, 2] and "is not let in: it does not know FARSPAN_SECRET" in outputs[0], outputs
    assert "1 of at least 2 hosts have come" in outputs[0]
    assert "does not let this host in.\n  why  it does not know FARSPAN_SECRET.\n  try  FARSPAN_SECRET=" in outputs[1]

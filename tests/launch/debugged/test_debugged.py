"""A debugger in one rank, under `farspan run --debug`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.support.launcher import SOURCE, TIMEOUT_S, Job
from tests.support.ranks import run_processes

from farspan.cli.main import main

TRAIN = """
import torch, farspan
torch.manual_seed(0)
model = farspan.distribute(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
for step in range(3):  # without an optimizer, for which torch loads much
    model.zero_grad()
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    with torch.no_grad(): [parameter.sub_(0.1 * parameter.grad) for parameter in model.parameters()]
    breakpoint()
    print(loss.item())
"""


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.close()


def run_with_keys(folder, script, keys, *words):
    path = folder / "train.py"
    path.write_text(script)
    command = [sys.executable, "-m", "farspan", "run", "-n", "2", *words, "--log-dir", str(folder / "logs"), str(path)]
    env = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, input=keys, capture_output=True, text=True, env=env, timeout=TIMEOUT_S)


def test_one_steps_through_a_rank_and_the_losses_stay(tmp_path):
    done = run_with_keys(tmp_path, TRAIN, "p 'rank', farspan.rank(), step\nnext\nc\nc\nc\n", "--debug", "1")
    assert done.returncode == 0, done.stderr
    assert "(Pdb) ('rank', 1, 0)\n" in done.stdout
    log = (tmp_path / "logs" / "rank0.log").read_text().splitlines()
    losses = [line for line in log if line.startswith("0.")]  # a hint may stand between them
    assert len(losses) == 3
    assert all(f"{loss}\n" in done.stdout for loss in losses)
    path = tmp_path / "plain.py"
    path.write_text(TRAIN.replace("    breakpoint()\n", ""))
    (plain,) = run_processes(1, path)
    assert plain.code == 0 and plain.stdout.split() == losses


def test_who_leaves_the_debugger_ends_the_run(tmp_path):
    script = "import os, time\nbreakpoint()\nif os.environ['FARSPAN_RANK'] == '0': time.sleep(600)\n"
    done = run_with_keys(tmp_path, script, "q\n", "--debug", "1")
    assert done.returncode == 1
    assert "rank 1 of 2 failed" in done.stderr and "Its own output is above." in done.stderr


def test_the_others_wait_as_long_as_it_takes(job, monkeypatch):
    monkeypatch.setenv("FARSPAN_DEADLINE", "5")
    code, out, _ = job.run("print(rank, os.environ['FARSPAN_DEADLINE'])", debugged=1)
    assert (code, out) == (0, "1 1000000000.0\n")
    assert job.log(0) == "0 1000000000.0\n"


def test_ctrl_c_is_for_the_debugged_rank_alone(job):
    script = (
        "def interrupted(*_):\n    open(f'{here}/interrupted{rank}', 'w').close()\n    os._exit(0)\n"
        "signal.signal(signal.SIGINT, interrupted)\n"
        "open(f'{here}/ready{rank}.tmp', 'w').write(str(os.getpid()))\n"
        "os.rename(f'{here}/ready{rank}.tmp', f'{here}/ready{rank}')\n"
        "while rank or not os.path.exists(f'{here}/interrupted1'): time.sleep(0.01)\n"
    )
    job.start(script, debugged=1)
    for rank in (0, 1):
        job.pid(rank)
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.end()
    assert (code, err) == (0, "")
    assert not (job.folder / "interrupted0").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-n", "2", "--debug", "2"], "--debug 2 is no rank of 2"),
        (["-n", "2", "--debug", "0", "--max-restarts", "3"], "--debug and --max-restarts do not go together"),
        (["-n", "2", "--debug", "0", "--keep-going"], "--debug and --keep-going do not go together"),
        (["--hosts", "a:2", "--debug", "0"], "--debug and --hosts do not go together"),
        (["--role", "a=2", "--debug", "0"], "--debug and --role do not go together"),
    ],
)
def test_what_cannot_be_debugged_is_refused(words, says, capsys):
    assert main(["run", *words, "train.py"]) == 2
    err = capsys.readouterr().err
    assert says in err and "  why  " in err and "  try  " in err

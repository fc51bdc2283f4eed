"""The examples of roles and services, as their first lines say that they are run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.ranks import run_processes

ROOT = Path(__file__).resolve().parents[2]


def _run(*words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "farspan", "run", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_asynchronous_replicas_come_as_far_as_synchronous_training():
    done = _run("--role", "worker=4", "--role", "server=1", "examples/gradient_server.py", timeout_s=200)
    rows = [[float(word) for word in line.split()] for line in done.stdout.splitlines()[1:-1]]
    assert len(rows) == 10 and rows[-1][0] == 2000
    _, asynchronous, synchronous = rows[-1]
    assert synchronous < 0.25 and asynchronous < 1.3 * synchronous
    assert "without it" not in done.stderr


@pytest.mark.timeout(600)
def test_actors_and_a_learner_of_two_ranks_keep_the_pole_up():
    pytest.importorskip("gymnasium")
    roles = ("--role", "actor=2", "--role", "learner=2")
    done = _run(*roles, "examples/actor_learner.py", "--goal", "150", timeout_s=500)
    last = done.stdout.splitlines()[-1]
    assert float(last.split()[-2]) >= 150
    assert "without it" not in done.stderr


def test_a_loader_role_gives_the_learner_the_batches_and_numbers_of_the_plain_program():
    done = _run("--role", "loader=1", "--role", "learner=2", "examples/loader_role.py", timeout_s=200)
    (plain,) = run_processes(1, ROOT / "examples" / "loader_role.py")
    assert plain.code == 0, plain.stderr
    assert done.stdout == plain.stdout and len(done.stdout.splitlines()) == 10

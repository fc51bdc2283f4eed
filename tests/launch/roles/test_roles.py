"""Several programs in one run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.launch.roles.roles import RunOfRoles
from tests.support.launcher import is_running, wait_until

from farspan.cli.main import main
from farspan.launch.roles import describe_process, role


@pytest.fixture
def job(tmp_path):
    job = RunOfRoles(tmp_path)
    yield job
    job.close()


ACTORS_AND_LEARNERS = ("--role", "actor=2", "--role", "learner=2")


def test_each_process_has_a_role_and_a_rank_in_it(job):
    code, out, err = job.run(
        "print(role, rank, os.environ['FARSPAN_WORLD_SIZE'])", "--role", "actor=3", "--role", "end=1"
    )
    # the actors may have been ended before they wrote
    assert code == 0 and out == "end 0 1\n", err
    assert "farspan run: 3 of actor, 1 of end; the run is over when end is; logs in" in err


def test_no_role_without_roles():
    assert role() == "" and describe_process() == f"process {os.getpid()}"


def test_the_run_is_over_when_the_last_role_is_and_the_others_are_ended(job):
    script = "if role == 'actor':\n    ready(); time.sleep(1000)\nsys.stdin.read(); ready()\n"
    script += "while not os.path.exists(f'{here}/go'): time.sleep(0.01)\nprint('done')\n"
    job.start(script, *ACTORS_AND_LEARNERS)
    actors = [job.pid("actor0"), job.pid("actor1")]
    (job.folder / "go").touch()
    code, out, err = job.end()
    assert code == 0 and out == "done\n", err
    assert "failed" not in err and not any(map(is_running, actors))


def test_a_role_that_ends_lets_the_others_go_on(job):
    script = "if role == 'actor':\n    ready(); sys.exit(0)\n"
    script += "while not os.path.exists(f'{here}/go'): time.sleep(0.01)\nprint('done')\n"
    job.start(script, *ACTORS_AND_LEARNERS)
    for process in ("actor0", "actor1"):
        pid = job.pid(process)
        wait_until(lambda pid=pid: not is_running(pid))
    (job.folder / "go").touch()
    code, out, err = job.end()
    assert (code, out) == (0, "done\n") and "without" not in err


def test_a_process_that_is_killed_or_fails_is_left_out_and_said(job):
    script = "if role == 'actor':\n    if rank == 1: raise ValueError('of its own')\n    ready(); time.sleep(1000)\n"
    script += "while not os.path.exists(f'{here}/go'): time.sleep(0.01)\nprint('done')\n"
    job.start(script, "--role", "actor=3", "--role", "learner=1")
    killed = job.pid("actor0")
    os.kill(killed, signal.SIGKILL)
    job.wait_until_said("actor 0 was killed by SIGKILL; the run goes on without it; its log is")
    job.wait_until_said("actor 1 has failed with exit code 1 (ValueError: of its own); the run goes on without it")
    other = job.pid("actor2")
    assert is_running(other)
    (job.folder / "go").touch()
    code, out, err = job.end()
    assert (code, out) == (0, "done\n")
    assert "learner" not in err.partition("logs in")[2]
    assert "ValueError: of its own" in job.log("actor/rank1.log")


def test_a_process_is_started_again_alone(job):
    script = "if role == 'actor':\n    print('start', os.environ['FARSPAN_RESTART']); ready(); time.sleep(1000)\n"
    script += "while not os.path.exists(f'{here}/go'): time.sleep(0.01)\n"
    job.start(script, "--role", "actor=2", "--role", "learner=1", "--max-restarts", "1")
    other = job.pid("actor1")
    for _ in range(2):
        os.kill(job.pid("actor0"), signal.SIGKILL)
    wait_until(lambda: is_running(other))
    (job.folder / "go").touch()
    code, _, err = job.end()
    assert code == 0 and "actor 0 was killed by SIGKILL; restart 1 of 1 of it" in err
    assert job.log("actor/rank0.log") == "start 0\n" and job.log("actor/restart-1/rank0.log") == "start 1\n"
    assert job.log("actor/rank1.log") == "start 0\n"


def test_the_same_error_twice_is_not_started_a_third_time(job):
    script = "if role == 'actor':\n    raise ValueError('again')\n"
    script += "while not os.path.exists(f'{here}/go'): time.sleep(0.01)\n"
    job.start(script, "--role", "actor=1", "--role", "learner=1", "--max-restarts", "5")
    job.wait_until_said("goes on without it")
    (job.folder / "go").touch()
    code, _, err = job.end()
    assert code == 0 and "restart 1 of 5" in err and "restart 2 of 5" not in err


def test_the_last_role_fails_as_a_run_does(job):
    script = "if role == 'actor':\n    ready(); time.sleep(1000)\nif rank == 1: sys.exit(7)\ntime.sleep(1000)\n"
    code, _, err = job.run(script, *ACTORS_AND_LEARNERS)
    assert code == 7 and "farspan run: learner: rank 1 of 2 failed: exit code 7." in err


def test_a_signal_ends_all_roles(job):
    job.start("ready(); time.sleep(1000)\n", *ACTORS_AND_LEARNERS, "--files", "all")
    assert job.process is not None
    pids = [job.pid(process) for process in ("actor0", "actor1", "learner0", "learner1")]
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.end()
    assert code == 130 and err.count("SIGINT") == 2, err  # passed on, and ended by it
    assert not any(map(is_running, pids))


def test_only_the_last_role_is_one_program(job):
    script = "import random\nopen(f'{here}/part-{role}-{rank}', 'w').write(str(random.random()))\n"
    script += "os.rename(f'{here}/part-{role}-{rank}', f'{here}/{role}-{rank}')\n"
    script += "paths = [f'{here}/actor-{number}' for number in range(2)]\n"
    script += "while role == 'learner' and rank == 0 and not all(map(os.path.exists, paths)): time.sleep(0.01)\n"
    code, _, err = job.run(script, *ACTORS_AND_LEARNERS)
    assert code == 0, err
    actors = {(job.folder / f"actor-{rank}").read_text() for rank in range(2)}
    assert len(actors) == 2  # each writes where it says, and draws numbers of its own
    assert not (job.folder / "learner-1").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--role", "actor"], "'actor' is no role, as actor=4"),
        (["--role", "actor=0"], "is no role"),
        (["--role", "../x=1"], "is no role"),
        (["--role", "a=1", "--role", "a=2"], "the role a is there twice"),
        (["--role", "a=1", "-n", "2"], "--role and -n do not go together"),
        (["--role", "a=1", "--hosts", "b:2", "-n", "2"], "--role and -n do not go together"),
        (["--role", "a=1", "-n", "2", "--join", "b:1"], "--role and a host that joins do not go together"),
        (["--role", "a=1", "--nnodes", "2", "--node-rank", "0", "--join", "b:1"], "how many processes?"),
        (
            ["--role", "a=2", "--role", "b=2", "--hosts", "localhost:3"],
            "4 processes of 2 roles, and 3 slots on 1 hosts",
        ),
    ],
)
def test_bad_use_is_refused(options, match, tmp_path, capfd):
    script = tmp_path / "script.py"
    script.touch()
    assert main(["run", *options, str(script)]) == 2
    assert match in capfd.readouterr().err


def test_roles_need_no_torch():
    program = "import sys, farspan; farspan.role(); print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )

"""Real processes that fail or are interrupted: one traceback, nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.launcher import READY, SOURCE, Job, is_running, wait_until

from farspan.launch.attempts.outcome import _without_difference


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.close()


# ---- one traceback


def test_failing_rank_s_traceback_is_shown_once(job):
    script = "def f():\n    raise ValueError('boom')\nif rank == 1:\n    try: f()\n"
    script += "    except ValueError as e: raise KeyError('outer') from e\n"
    code, out, err = job.run(script, 3)
    assert code == 1
    assert "rank 1 of 3 failed: exit code 1" in err
    assert err.count("ValueError: boom") == 1
    report = err[err.index("farspan run:") :].splitlines()
    assert report[:3] == ["farspan run: rank 1 of 3 failed: exit code 1.", "", "Traceback (most recent call last):"]
    assert err.count("KeyError: 'outer'") == 1
    assert err.count("Traceback") == 2 and "in f\n" in err
    assert str(job.logs / "rank1.log") in err
    assert "boom" not in out and "child.py" not in err


def test_rank_0_s_traceback_is_not_repeated(job):
    code, _, err = job.run("if rank == 0: raise ValueError('boom')")
    assert code == 1
    assert err.count("Traceback") == 1
    assert "rank 0 of 2 failed: exit code 1.\n  why   ValueError: boom\n  Its own output is above." in err


def test_a_script_that_asks_for_its_rank_is_told_that_there_is_one_process(job):
    code, _, err = job.run("if rank == 1: os.environ['RANK']\ntime.sleep(100)", grace_s=0.1)
    assert code == 1
    assert err.count("KeyError: 'RANK'\n") == 1 and "  try   to the script there is one process: leave out init" in err


def test_exit_code_is_the_culprit_s(job):
    code, _, err = job.run("print('last words of rank', rank)\nif rank == 1: sys.exit(7)")
    assert code == 7
    assert "rank 1 of 2 failed: exit code 7" in err and "last words of rank 1" in err


def test_what_all_ranks_say_before_sys_exit_is_shown_once(job):
    script = "for i in range(3): print('step', i)\nif rank == 0: time.sleep(1)\nsys.exit('the data are bad')\n"
    code, out, err = job.run(script)
    assert code == 1 and out.count("step 2") == 1
    assert err.count("the data are bad") == 1 and "step" not in err
    assert "rank 0 of 2 failed: exit code 1.\n  Its own output is above." in err


def test_what_one_rank_says_before_sys_exit_is_shown_without_the_lines_of_all(job):
    script = "for i in range(3): print('step', i)\nif rank == 1: sys.exit('the data of rank 1 are bad')\n"
    code, out, err = job.run(script)
    assert code == 1 and out.count("step 2") == 1
    assert "rank 1 of 2 failed: exit code 1.\n\nthe data of rank 1 are bad\n" in err and "step" not in err


def test_a_killed_worker_of_the_data_on_each_rank_is_one_traceback(job):
    """Each rank has workers of its own, and torch names their processes."""
    script = """
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self): return 8
    def __getitem__(self, number): os.kill(os.getpid(), 9)

if rank == 0: time.sleep(1)
list(DataLoader(Data(), num_workers=1))
"""
    code, _, err = job.run(script)
    assert code == 1
    assert err.count("in <module>\n    list(DataLoader(Data(), num_workers=1))") == 1
    assert "rank 0 of 2 failed: exit code 1.\n  why   RuntimeError: DataLoader worker (pid" in err


@pytest.mark.parametrize("leaves", [0, 1])
def test_exit_code_is_that_of_the_rank_that_leaves_the_others(job, leaves):
    """Both find then that their programs differ: the other one waits for a step that this one will not begin."""
    script = "import torch, farspan\n"
    script += "model = farspan.distribute(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))\n"
    script += "for step in range(2):\n    model(torch.ones(2, 4)).sum().backward()\n    farspan.flush()\n"
    script += f"    if step == 0 and rank == {leaves}: sys.exit(3)\n"
    code, _, err = job.run(script)
    assert code == 3
    assert f"rank {leaves} of 2 failed: exit code 3" in err
    assert f"DivergenceError: rank {leaves} has ended its program" in err


def test_a_rank_that_leaves_python_at_once_is_named(job):
    """The other one was, and the system's log was advised, though nothing was killed."""
    script = "import torch, farspan\n"
    script += "model = farspan.distribute(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))\n"
    script += "model(torch.ones(2, 4)).sum().item()\n"
    script += "if rank == 1: os._exit(0)\nmodel(torch.ones(2, 4)).sum().item()\n"
    code, _, err = job.run(script)
    assert code == 1
    assert "farspan run: rank 1 of 2 ended in the middle of its program (exit code 0).\n  why   it has left" in err
    assert err.endswith("rank1.log\n"), err


@pytest.mark.skipif(sys.platform == "darwin", reason="signals of macOS have other numbers")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_rank_is_named_with_its_signal(job, number):
    script = "try: 1 / 0\nexcept Exception:\n    import traceback; traceback.print_exc()\n"
    script += "for i in range(30): print('of all', i)\nfor i in range(10): print('line', rank, i)\n"
    code, out, err = job.run(script + f"if rank == 1: os.kill(os.getpid(), {int(number)})")
    assert code == 128 + number
    assert f"rank 1 of 2 failed: killed by {number.name}" in err
    report = err[err.index("farspan run:") :]
    assert "line 1 9" in report and "ZeroDivisionError" not in report  # the caught one is not the cause
    assert "of all 29" in out and "of all" not in report  # which rank 0 has printed, so that the console has it


def test_of_a_killed_rank_only_the_log_is_named_where_the_console_has_the_rest(job):
    script = "for i in range(30): print('step', i, flush=True)\nif rank == 1: os.kill(os.getpid(), 9)"
    code, _, err = job.run(script)
    assert code == 128 + 9
    report = err[err.index("farspan run:") :].splitlines()
    assert report[0] == "farspan run: rank 1 of 2 failed: killed by SIGKILL."
    assert report[1] == "  What it wrote does not say why." and report[-1].startswith("  logs  ")
    assert "step" not in err


def test_culprit_is_the_rank_that_failed_by_itself(job):
    script = (
        "class RemoteError(Exception): __module__ = 'farspan.errors'\n"
        "if rank == 2:\n"
        "    log = here + '/logs/rank1.log'\n"
        "    while not (os.path.exists(log) and 'RemoteError: ' in open(log).read()): time.sleep(0.01)\n"
        "    time.sleep(0.2)  # so that rank 1 has ended\n"
        "    raise ValueError('the cause')\n"
        "raise RemoteError('rank 2 failed')\n"
    )
    code, _, err = job.run(script, 3)
    assert code == 1
    assert "rank 2 of 3 failed: exit code 1.\n" in err and err.count("ValueError: the cause") == 1
    assert err[err.index("farspan run:") :].count("Traceback") == 1


def test_what_rank_0_writes_before_all_ranks_fail_is_whole(job, tmp_path):
    """Rank 1 fails first, for it writes nothing: it answers what rank 0 still asks it."""
    script = (
        "import farspan, torch\n"
        "model = farspan.distribute(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))))\n"
        "model(torch.ones(2, 256)).sum().backward()\n"
        "farspan.flush()\n"
        "if rank == 0: time.sleep(1)\n"
        "torch.save(model.state_dict(), here + '/weights.pt')\n"
        "print('saved')\n"
        "raise ValueError('on all ranks')\n"
    )
    code, out, err = job.run(script)
    assert code == 1 and "saved\n" in out, err
    assert err.count("ValueError: on all ranks\n") == 2, "the traceback, and the line of the launcher"
    sizes = [item.numel() for item in torch.load(tmp_path / "weights.pt").values()]
    assert sizes == [256 * 256, 256] * 4


@pytest.mark.parametrize("is_handled", [False, True])
def test_an_error_of_the_program_s_is_the_cause_of_one_of_farspan_s(job, is_handled):
    """One rank may have a consequence of a mistake, and end first. What the program raises because of it is none."""
    script = (
        "class RecordError(Exception): __module__ = 'farspan.errors'\n"
        "def fail():\n"
        f"    if {is_handled}: raise RecordError('heard by rank 0 too')\n"
        "if rank == 1: raise RecordError('a consequence')\n"
        "log = here + '/logs/rank1.log'\n"
        "while not (os.path.exists(log) and 'RecordError: ' in open(log).read()): time.sleep(0.01)\n"
        "time.sleep(0.2)  # so that rank 1 has ended\n"
        "try: fail()\n"
        "finally: raise ValueError('of rank 0')\n"
    )
    code, _, err = job.run(script)
    assert code == 1
    said = "rank 1 of 2 failed: exit code 1" if is_handled else "rank 0 of 2 failed: exit code 1"
    assert said in err and ("a consequence" in err) == is_handled


def test_culprit_is_found_where_the_disk_of_the_logs_is_full(job):
    script = (
        "from farspan.launch.rank.notes import note_hearing\n"
        "note = os.environ['FARSPAN_RUN_FOLDER'] + '/heard-1'\n"
        "if rank == 0: print('RemoteError: rank 2 failed: OSError: no space left', file=sys.stderr)\n"
        "if rank == 1: note_hearing(1)\n"
        "if rank == 2:\n"
        "    while not os.path.exists(note): time.sleep(0.01)\n"
        "    time.sleep(0.2)  # so that rank 1 has ended\n"
        "sys.exit(1)\n"
    )
    code, _, err = job.run(script, 3)
    assert code == 1
    assert "farspan run: rank 2 of 3 failed: exit code 1.\n  why   OSError: no space left\n" in err


def test_hanging_survivors_are_ended_after_the_grace(job):
    script = READY + (
        "if rank == 1: sys.exit(3)\n"
        "helper = subprocess.Popen(['sleep', '60'])\n"
        "open(here + '/helper.tmp', 'w').write(str(helper.pid))\n"
        "os.rename(here + '/helper.tmp', here + '/readyhelper')\n"
        "time.sleep(60)\n"
    )
    code, _, err = job.run(script, grace_s=2.0)
    assert code == 3
    assert err.startswith("farspan run: rank 1 has ended; still running, and given 2 s: rank 0\n")
    assert "rank 1 of 2 failed: exit code 3" in err
    assert "still running 2 s after it: rank 0" in err
    assert err.endswith("rank1.log\n        " + err.rstrip().rpartition(" ")[2] + "\n") and "rank0.log" in err
    pids = [job.pid(0), job.pid("helper")]
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_survivor_ends_with_the_others(job):
    script = "if rank == 1:\n    while not os.path.exists(here + '/ready0'): time.sleep(0.01)\n"
    script += "    stat = f\"/proc/{open(here + '/ready0').read()}/stat\"\n"
    script += "    while open(stat).read().rpartition(')')[2].split()[0] != 'T': time.sleep(0.01)\n    sys.exit(3)\n"
    script += READY + "os.kill(os.getpid(), signal.SIGSTOP)\nprint('went on')\n"
    code, out, err = job.run(script, grace_s=20.0)
    assert code == 3 and out == "went on\n"
    assert "still running" not in err


def test_a_survivor_that_ignores_sigterm_is_killed(job):
    script = "if rank == 1:\n    while not os.path.exists(here + '/ready0'): time.sleep(0.01)\n    sys.exit(3)\n"
    script += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(60)\n"
    code, _, _ = job.run(script, grace_s=0.1)
    assert code == 3
    assert not is_running(job.pid(0))


def test_default_log_dir_is_named_only_when_something_fails(job, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(job.folder))
    code, _, err = job.run("pass", log_dir=None)
    assert (code, err) == (0, "")
    code, _, err = job.run("if rank == 1: sys.exit(1)", log_dir=None)
    log = Path(err.split("logs ")[1].strip())
    assert log.name == "rank1.log" and log.exists() and log.parent.parent == job.folder


# ---- nobody left behind


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_sigterm_and_a_closed_terminal_end_all(job, number):
    helper = "helper = subprocess.Popen(['sleep', '60'])\nrank += 3\n"
    job.start(READY + helper + READY.replace("os.getpid()", "helper.pid") + "time.sleep(60)", 3)
    pids = [job.pid(rank) for rank in range(6)]
    job.process.send_signal(number)
    code, _, err = job.end()
    assert code == 128 + number
    wait_until(lambda: not any(map(is_running, pids[3:])))  # what the ranks have started
    assert not any(map(is_running, pids))
    assert f"ended by {number.name}" in err and "failed" not in err
    assert ("KeyboardInterrupt" in job.log(1)) == (number == signal.SIGINT)


def test_ranks_may_end_well_after_ctrl_c(job):
    job.start("try:\n    " + READY.replace("\n", "\n    ") + "time.sleep(60)\nexcept KeyboardInterrupt: print('saved')")
    for rank in range(2):
        job.pid(rank)
    job.process.send_signal(signal.SIGINT)
    code, out, _ = job.end()
    assert (code, out) == (0, "saved\n")


def test_second_ctrl_c_ends_those_that_ignore_the_first(job):
    job.start("signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + READY + "print('on', flush=True)\ntime.sleep(60)")
    pids = [job.pid(rank) for rank in range(2)]
    job.process.send_signal(signal.SIGINT)
    assert "SIGINT passed on" in job.process.stderr.readline()
    assert all(map(is_running, pids))
    job.process.send_signal(signal.SIGINT)
    code, _, _ = job.end()
    assert code == 130
    assert not any(map(is_running, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_death_of_the_launcher_takes_the_ranks_along(job):
    job.start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(60)", 3)
    pids = [job.pid(rank) for rank in range(3)]
    assert all(map(is_running, pids))
    job.process.kill()
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_death_of_the_launcher_leaves_no_folder(job, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job.start(READY + "time.sleep(60)", 2)
    for rank in range(2):
        job.pid(rank)
    assert list(tmp_path.glob("farspan-run-*"))
    job.process.kill()
    wait_until(lambda: not list(tmp_path.glob("farspan-run-*")))


SWEPT = """
import os, sys, time
from farspan.launch.sweep import Sweeper
sweeper = Sweeper(sys.argv[1])
helper = os.fork()
if helper == 0:
    time.sleep(60)
print(helper, flush=True)
time.sleep(60)
"""


def test_a_folder_goes_when_its_process_is_killed_and_a_fork_of_it_lives_on(tmp_path):
    folder = tmp_path / "run"
    (folder / "files").mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", SWEPT, str(folder)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        helper = int(process.stdout.readline())
        process.kill()
        try:
            wait_until(lambda: not folder.exists())
            assert is_running(helper)
        finally:
            os.kill(helper, signal.SIGKILL)


USED = """
import os, sys, time
from farspan.launch.sweep import Sweeper, use
folder, noted = sys.argv[1:]
sweeper = Sweeper(folder)
end, entrance = os.pipe()
if os.fork() == 0:
    os.close(entrance)
    use(folder)
    print("ready", flush=True)
    os.read(end, 1)  # the other has been killed
    time.sleep(1)
    open(f"{folder}/late", "w").close()
    open(noted, "w").close()
    os._exit(0)
time.sleep(60)
"""


def test_a_folder_stays_for_who_still_uses_it(tmp_path):
    folder, noted = tmp_path / "run", tmp_path / "noted"
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", USED, str(folder), str(noted)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        wait_until(lambda: not folder.exists())
        assert noted.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sigusr1_of_the_launcher_shows_where_every_rank_is(job):
    script = "import torch, farspan\nfrom torch import nn\n"
    script += "model = farspan.distribute(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))\n"
    script += READY + "def stand():\n    while True: time.sleep(0.1)\nif rank == 1: stand()\n"
    script += "model(torch.ones(1, 2)).sum().item()\n"
    job.start(script)
    for rank in range(2):
        job.pid(rank)
    job.process.send_signal(signal.SIGUSR1)
    lines = iter(job.process.stderr.readline, "")
    assert any("rank 1 is at" in line for line in lines)
    assert any("in stand" in line for line in lines)
    job.process.send_signal(signal.SIGTERM)
    job.end()


def test_sigusr1_before_the_ranks_have_met_ends_nobody(job):
    job.start(READY + "sys.stdin.readline() if rank else time.sleep(2)", 2)
    for rank in range(2):
        job.pid(rank)
    job.process.send_signal(signal.SIGUSR1)
    code, _, err = job.end()
    assert code == 0 and "has not called farspan.distribute yet" in err


def test_a_difference_that_rank_0_has_shown_is_not_shown_again():
    text = "DivergenceError: rank 1 has ended its program\n  why  a step needs every rank"
    assert _without_difference(f"0 1.7\n{text}\n", f"Traceback\nfarspan.errors.{text}\n") == "0 1.7"
    assert _without_difference(f"0 1.7\n{text}\n", "DivergenceError: another\n") == f"0 1.7\n{text}\n"

"""Real processes: one console, one traceback, nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farspan.errors import LaunchError
from farspan.launch import run as run_module
from farspan.launch.run import run

SOURCE = Path(run_module.__file__).parents[2]
TIMEOUT_S = 30.0
LAUNCH = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest in the background ignores it
from farspan.launch.run import run
sys.exit(run({argv!r}, {n}, grace_s={grace_s}, **{options!r}))
"""
HEAD = "import os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\nhere = sys.path[0]\n"
# A rank that is ready says so with its process id.
READY = "open(f'{here}/ready{rank}.tmp', 'w').write(str(os.getpid()))\n"
READY += "os.rename(f'{here}/ready{rank}.tmp', f'{here}/ready{rank}')\n"


class Job:
    """A launcher in a process of its own, with a script of a few lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.process: subprocess.Popen[str] | None = None

    def start(self, script: str, n: int = 2, *, grace_s: float = 10.0, argv=(), **options) -> None:
        path = self.folder / "script.py"
        path.write_text(HEAD + script)
        options.setdefault("log_dir", str(self.logs))
        text = LAUNCH.format(argv=[str(path), *argv], n=n, grace_s=grace_s, options=options)
        self.process = subprocess.Popen(
            [sys.executable, "-c", text],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
        )

    def end(self) -> tuple[int, str, str]:
        assert self.process is not None
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, out, err

    def run(self, script: str, n: int = 2, **options) -> tuple[int, str, str]:
        self.start(script, n, **options)
        return self.end()

    def log(self, rank: int) -> str:
        return (self.logs / f"rank{rank}.log").read_text()

    def pid(self, rank: int | str) -> int:
        path = self.folder / f"ready{rank}"
        wait_until(path.exists)
        return int(path.read_text())


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    if job.process is not None and job.process.poll() is None:
        job.process.kill()
        job.process.communicate()


def wait_until(condition) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process runs; one that nobody reaped (no init in this container) has ended too."""
    stat = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---- one console


def test_rank_0_has_the_console_and_the_others_have_files(job):
    code, out, err = job.run("print('out', rank)\nprint('err', rank, file=sys.stderr)", 3)
    assert (code, out, err) == (0, "out 0\n", "err 0\n")
    assert "out 1\n" in job.log(1) and "err 1\n" in job.log(1)
    assert "out 2\n" in job.log(2)
    assert not (job.logs / "rank0.log").exists()


def test_processes_know_their_place(job):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR FARSPAN_LAUNCHER FARSPAN_LOG_DIR EXTRA"
    script = f"print([os.environ[name] for name in {names.split()}], os.environ['MASTER_PORT'].isdecimal())"
    code, _, _ = job.run(script, 3, environment={"EXTRA": "more"})
    expected = ["2", "2", "3", "3", "127.0.0.1", "run", str(job.logs), "more"]
    assert code == 0
    assert job.log(2) == f"{expected} True\n"


def test_cores_are_shared_unless_the_user_said(job, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _, out, _ = job.run("print(os.environ['OMP_NUM_THREADS'])", 1)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert int(out) == num_cores
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    _, out, _ = job.run("print(os.environ['OMP_NUM_THREADS'])", 2)
    assert int(out) == 7


def test_the_script_starts_as_under_plain_python(job):
    code, out, _ = job.run(
        "import __main__\n"
        "print(__name__, __main__.rank, sys.argv[1:], sys.flags.isolated, sys.flags.no_site)\n"
        "print(here == os.path.dirname(__file__), sys.prefix)",
        argv=["--lr", "3e-4", "a b", "--", "-n", "5"],
    )
    assert code == 0
    assert out.splitlines() == [
        "__main__ 0 ['--lr', '3e-4', 'a b', '--', '-n', '5'] 0 0",
        f"True {sys.prefix}",
    ]


def test_modules_and_executables_run_too(job, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys\nprint(__name__, sys.argv[1:])")
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\necho "tool $RANK $1"\n')
    tool.chmod(0o755)
    log = tmp_path / "rank1.log"
    for argv, expected in [
        (["-m", "package.train", "x"], "__main__ ['x']\n"),
        (["tool", "x"], "tool 1 x\n"),
        (["sh", "-c", "echo $RANK"], "1\n"),
    ]:
        assert run(argv, 2, log_dir=tmp_path) == 0
        assert log.read_text() == expected


def test_only_rank_0_reads_stdin(job):
    code, _, _ = job.run("assert sys.stdin.read() == ''")  # nobody hangs
    assert code == 0


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals")
def test_progress_bars_see_a_terminal(job):
    ours, theirs = os.openpty()
    path = job.folder / "bar.py"
    path.write_text("import os, sys\nsys.stderr.write(f'tty={os.isatty(2)}\\r50%\\n')")
    text = LAUNCH.format(argv=[str(path)], n=1, grace_s=1, options={})
    env = os.environ | {"PYTHONPATH": str(SOURCE)}
    result = subprocess.run(
        [sys.executable, "-c", text], stdin=subprocess.DEVNULL, stderr=theirs, env=env, timeout=TIMEOUT_S
    )
    assert result.returncode == 0
    assert os.read(ours, 1000) == b"tty=True\r50%\r\n"
    os.close(ours)
    os.close(theirs)


def test_a_helper_left_behind_holds_up_nobody(job):
    script = READY + "if rank == 0: subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)"
    code, _, _ = job.run(script)  # within its time limit, less than 60 s
    assert code == 0
    os.killpg(job.pid(0), signal.SIGKILL)  # it lives on, as under plain python


# ---- one traceback


def test_failing_rank_s_traceback_is_shown_once(job):
    script = "def f():\n    raise ValueError('boom')\nif rank == 1:\n    try: f()\n"
    script += "    except ValueError as e: raise KeyError('outer') from e\n"
    code, out, err = job.run(script, 3)
    assert code == 1
    assert "rank 1 of 3 failed: exit code 1" in err
    assert err.count("ValueError: boom") == 1 and err.count("KeyError: 'outer'") == 1
    assert err.count("Traceback") == 2 and "in f\n" in err
    assert str(job.logs / "rank1.log") in err
    assert "boom" not in out and "child.py" not in err


def test_rank_0_s_traceback_is_not_repeated(job):
    code, _, err = job.run("if rank == 0: raise ValueError('boom')")
    assert code == 1
    assert err.count("ValueError: boom") == 1
    assert "rank 0 of 2 failed: exit code 1" in err


def test_exit_code_is_the_culprit_s(job):
    code, _, err = job.run("print('last words')\nif rank == 1: sys.exit(7)")
    assert code == 7
    assert "rank 1 of 2 failed: exit code 7" in err and "last words" in err


@pytest.mark.skipif(sys.platform == "darwin", reason="signals of macOS have other numbers")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_rank_is_named_with_its_signal(job, number):
    script = "try: 1 / 0\nexcept Exception:\n    import traceback; traceback.print_exc()\n"
    script += "for i in range(30): print('line', i)\n"
    code, _, err = job.run(script + f"if rank == 1: os.kill(os.getpid(), {int(number)})")
    assert code == 128 + number
    assert f"rank 1 of 2 failed: killed by {number.name}" in err
    report = err[err.index("farspan run:") :]
    assert "line 29" in report and "ZeroDivisionError" not in report  # the caught one is not the cause


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
    assert "rank 2 of 3 failed: exit code 1" in err
    assert err.count("ValueError: the cause") == 1


def test_hanging_survivors_are_ended_after_the_grace(job):
    script = READY + (
        "if rank == 1: sys.exit(3)\n"
        "helper = subprocess.Popen(['sleep', '60'])\n"
        "open(here + '/helper.tmp', 'w').write(str(helper.pid))\n"
        "os.rename(here + '/helper.tmp', here + '/readyhelper')\n"
        "time.sleep(60)\n"
    )
    code, _, err = job.run(script, grace_s=0.5)
    assert code == 3
    assert "rank 1 of 2 failed: exit code 3" in err
    assert "still running: rank 0" in err
    pids = [job.pid(0), job.pid("helper")]
    wait_until(lambda: not any(map(is_running, pids)))


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_all(job, number):
    job.start(READY + "time.sleep(60)", 3)
    pids = [job.pid(rank) for rank in range(3)]
    job.process.send_signal(number)
    code, _, err = job.end()
    assert code == 128 + number
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


# ---- refused before anything starts


def test_bad_use_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    plain = tmp_path / "notes.txt"
    plain.write_text("")
    for argv, n, options, says in [
        ([str(script)], 0, {}, "cannot start 0 processes"),
        ([], 1, {}, "no script to run"),
        (["-m"], 1, {}, "-m needs the name of a module"),
        ([str(tmp_path / "absent.py")], 1, {}, "there is no script"),
        ([str(plain)], 1, {}, "chmod +x"),
        ([str(tmp_path)], 1, {}, "is a folder"),
        ([str(script)], 1, {"port": 70000}, "no port 70000"),
        ([str(script)], 1, {"log_dir": script / "logs"}, "cannot be made"),
    ]:
        with pytest.raises(LaunchError) as caught:
            run(argv, n, **options)
        assert says in str(caught.value)
        assert caught.value.why and caught.value.hint


def test_a_port_in_use_is_refused(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LaunchError, match="another program listens there"):
            run([sys.executable], 1, port=taken.getsockname()[1])


# ---- what a log says


def cause(log: str) -> str:
    return run_module._find_cause(log, killed=False)


def test_traceback_is_found_among_other_output():
    traceback = "Traceback (most recent call last):\n  File 'a', line 1\n    f()\nValueError: a\n  why  b"
    assert cause(f"hello\n{traceback}\n") == traceback
    assert cause(f"Traceback (most recent call last):\n  x\nKeyError: 1\nagain\n{traceback}") == traceback
    assert cause(f" 50%|### | 5/10{traceback}") == traceback
    prefixed = "".join(f"[rank3]: {line}\n" for line in traceback.splitlines()) + "[rank3]: "
    assert cause(prefixed) == traceback


def test_exception_group_is_shown_whole():
    group = (
        "  + Exception Group Traceback (most recent call last):\n  |   File 'a', line 1\n"
        "  | ExceptionGroup: two (2 sub-exceptions)\n  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n    |   File 'a', line 1\n    | ValueError: a\n"
        "    +------------------------------------"
    )
    assert cause("hello\n" + group) == group


def test_without_a_traceback_the_last_lines_are_shown():
    assert cause("\n".join(map(str, range(100)))).splitlines() == [str(i) for i in range(80, 100)]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", False),
        ("RemoteError: rank 1 failed.\n", True),
        ("Traceback (most recent call last):\n  x\nfarspan.errors.RemoteError: rank 1\n  why  x\n", True),
        (
            "[rank2]: Traceback (most recent call last):\n[rank2]:   x\n[rank2]: RemoteError: a\n[rank2]: ",
            True,
        ),
        ("RemoteError: old\nTraceback (most recent call last):\n  x\nValueError: a\n", False),
        ("Traceback (most recent call last):\n  x\nMyRemoteError: a\n", False),
    ],
)
def test_who_only_heard_of_a_failure_is_told_by_the_last_exception(log, expected):
    assert run_module._only_heard_of_it(log) is expected

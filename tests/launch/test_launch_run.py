"""Real processes: one console, and what is refused before anything starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

import pytest
from tests.support.launcher import LAUNCH, READY, SOURCE, TIMEOUT_S, Job, is_running, wait_until

from farspan.errors import LaunchError
from farspan.launch.run_job import run
from farspan.launch.terminal import LogCopy


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.close()


# ---- one console


def test_rank_0_has_the_console_and_all_have_logs(job):
    code, out, err = job.run("print('out', rank)\nprint('err', rank, file=sys.stderr)", 3)
    assert (code, out, err) == (0, "out 0\n", "err 0\n")
    assert "out 1\n" in job.log(1) and "err 1\n" in job.log(1)
    assert "out 2\n" in job.log(2)
    assert sorted(job.log(0).splitlines()) == ["err 0", "out 0"]


def test_stdout_and_stderr_that_are_one_file_keep_their_order(job):
    script = "for i in range(500):\n    os.write(1, b'out %d\\n' % i)\n    os.write(2, b'err %d\\n' % i)"
    job.start(script, stderr=subprocess.STDOUT)
    code, out, _ = job.end()
    assert (code, out) == (0, "".join(f"out {i}\nerr {i}\n" for i in range(500)))
    assert job.log(0) == out


def test_nothing_is_lost_where_the_reader_is_late(job):
    job.start(READY + "os.write(1, b'x' * 100_000)", 1)  # more than one pipe holds
    pid = job.pid(0)
    wait_until(lambda: not is_running(pid))
    code, out, _ = job.end()
    assert (code, out, job.log(0)) == (0, "x" * 100_000, "x" * 100_000)


def test_the_program_learns_that_its_reader_is_gone(job):
    script = READY + (
        "try:\n    while True: print('more')\n"
        "except BrokenPipeError:\n    open(f'{here}/broken', 'w').close()\n    os._exit(3)"
    )
    job.start(script, 1)
    job.process.stdout.close()
    assert job.process.wait(TIMEOUT_S) == 3 and (job.folder / "broken").exists()


def test_a_reader_that_does_not_read_holds_up_no_end(job):
    job.start(READY + "while True: print('x' * 1000)", 1)
    wait_until(lambda: (job.logs / "rank0.log").exists() and (job.logs / "rank0.log").stat().st_size > 60_000)
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(TIMEOUT_S) == 128 + signal.SIGTERM


def test_a_log_that_cannot_be_written_is_said_once(capfd):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs a device that is always full")
    with open("/dev/full", "wb") as file:
        log = LogCopy(file.fileno())
    for _ in range(2):
        log.write(b"line\n")
    assert capfd.readouterr().err.count("a log cannot be written any more (No space left on device)") == 1


def test_one_rank_leaves_no_folder_for_temporary_files(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run(["true"], 1) == 0
    assert not list(tmp_path.iterdir())


def test_processes_know_their_place(job):
    names = [f"FARSPAN_{name}" for name in ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]]
    names += ["FARSPAN_LAUNCHER", "FARSPAN_LOG_DIR", "EXTRA"]
    of_store = "os.stat(os.path.dirname(os.environ['FARSPAN_STORE'])).st_mode & 0o777 == 0o700"
    script = f"print([os.environ[name] for name in {names}], {of_store})"
    code, _, _ = job.run(script, 3, environment={"EXTRA": "more"})
    expected = ["2", "2", "3", "3", "run", str(job.logs), "more"]
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
    tool.write_text('#!/bin/sh\necho "tool $FARSPAN_RANK $1"\n')
    tool.chmod(0o755)
    log = tmp_path / "rank1.log"
    for argv, expected in [
        (["-m", "package.train", "x"], "__main__ ['x']\n"),
        (["tool", "x"], "tool 1 x\n"),
        (["sh", "-c", "echo $FARSPAN_RANK"], "1\n"),
    ]:
        assert run(argv, 2, log_dir=tmp_path) == 0
        assert log.read_text() == expected


def test_only_rank_0_reads_stdin(job):
    code, _, _ = job.run("assert sys.stdin.read() == ''")  # nobody hangs
    assert code == 0


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals")
def test_progress_bars_see_a_terminal_and_stdout_is_that_terminal(job):
    ours, theirs = os.openpty()
    path = job.folder / "bar.py"
    path.write_text(
        f"import os, sys\nassert os.ttyname(1) == {os.ttyname(theirs)!r}\n"
        "sys.stderr.write(f'tty={os.isatty(2)}\\r50%\\n')"
    )
    text = LAUNCH.format(argv=[str(path)], n=1, grace_s=1, options={"log_dir": str(job.logs)})
    env = os.environ | {"PYTHONPATH": str(SOURCE)}
    result = subprocess.run(
        [sys.executable, "-c", text], stdin=theirs, stdout=theirs, stderr=theirs, env=env, timeout=TIMEOUT_S
    )
    assert result.returncode == 0
    assert os.read(ours, 1000) == b"tty=True\r50%\r\n"
    assert (job.logs / "rank0.log").read_bytes() == b"tty=True\r50%\n"
    os.close(ours)
    os.close(theirs)


def test_a_helper_left_behind_holds_up_nobody(job):
    script = READY + "if rank == 0: subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)"
    code, _, _ = job.run(script)  # within its time limit, less than 60 s
    assert code == 0
    os.killpg(job.pid(0), signal.SIGKILL)  # it lives on, as under plain python


# ---- refused before anything starts


def test_a_folder_or_an_empty_name_instead_of_a_script_gets_a_command_that_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("")
    for name, says, hint in [
        (".", "which has gpt.py", "farspan run -n 4 gpt.py"),
        (str(tmp_path), "which has gpt.py", f"farspan run -n 4 {tmp_path / 'gpt.py'}"),
        ("package", "is a folder", "farspan run -n 4 -m package"),
        ("", 'the name given is empty: ""', "farspan run -n 4 train.py"),
    ]:
        with pytest.raises(LaunchError) as caught:
            run([name], 1)
        assert says in str(caught.value)
        assert caught.value.hint == hint


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
        ([str(script)], 1, {"log_dir": script / "logs"}, "cannot be made"),
    ]:
        with pytest.raises(LaunchError) as caught:
            run(argv, n, **options)
        assert says in str(caught.value)
        assert caught.value.why and caught.value.hint

"""The command line as a user types it: help, versions, bad use, and `farspan run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.launcher import TIMEOUT_S

from farspan.cli import main as main_module

SOURCE = Path(main_module.__file__).parents[2]
SHOW = (
    "import os, sys\n"
    "get = os.environ.get\n"
    "print(get('FARSPAN_RANK'), sys.argv[1:], get('FARSPAN_REPORT'), get('FARSPAN_VERBOSE'))\n"
)


@pytest.fixture
def farspan(tmp_path):
    (tmp_path / "train.py").write_text(SHOW)

    def call(*words: str, python=("-m", "farspan")) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(SOURCE), "TMPDIR": str(tmp_path)}
        env = {
            name: text
            for name, text in env.items()
            if name not in ("FARSPAN_REPORT", "FARSPAN_SANITIZE", "FARSPAN_VERBOSE")
        }
        return subprocess.run(
            [sys.executable, *python, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            cwd=tmp_path,
            env=env,
        )

    return call


def test_help_imports_nothing_heavy(farspan):
    code = (
        "import sys\nfrom farspan.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('HEAVY', [m for m in ('torch', 'numpy', 'rich', 'importlib.metadata', 'subprocess')"
        " if m in sys.modules])"
    )
    for words in (["--help"], ["run", "--help"]):
        result = farspan(*words, python=("-c", code))
        assert result.returncode == 0
        assert "usage: farspan" in result.stdout and "HEAVY []" in result.stdout


def test_starting_processes_imports_no_torch(farspan):
    code = (
        "import sys\nfrom farspan.cli.main import main\nmain(['run', '-n', '1', 'train.py'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    result = farspan(python=("-c", code))
    assert result.returncode == 0, result.stderr


def test_an_option_behind_the_script_is_pointed_out(farspan, tmp_path):
    result = farspan("run", "-n", "1", "train.py", "--max-restarts=3", "--verbose")
    assert result.stdout.strip() == "0 ['--max-restarts=3', '--verbose'] None None"
    (line,) = result.stderr.splitlines()
    assert line.startswith("farspan: --max-restarts after the script is given to the script; farspan's options come ")
    assert line.endswith("before it: farspan run --max-restarts ... train.py")


def test_an_option_that_the_script_has_itself_is_not(farspan, tmp_path):
    (tmp_path / "train.py").write_text(f"{SHOW}# parser.add_argument('--report')\n")
    result = farspan("run", "-n", "1", "train.py", "--report", "x.json")
    assert result.stdout.strip() == "0 ['--report', 'x.json'] None None" and result.stderr == ""


def test_version(farspan):
    result = farspan("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("farspan ")


def test_no_command_shows_the_help(farspan):
    result = farspan()
    assert result.returncode == 2
    assert "usage: farspan" in result.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py"], []),
        (["train.py", "--lr", "3e-4", "-n", "7", "--help"], ["--lr", "3e-4", "-n", "7", "--help"]),
        (["train.py", "-m", "x", "--", "--verbose"], ["-m", "x", "--", "--verbose"]),
        (["--", "train.py", "--lr", "1"], ["--lr", "1"]),
        (["--log-dir", "run", "train.py", "run"], ["run"]),
        (["-m", "train", "--lr", "1", "-m", "--", "-n"], ["--lr", "1", "-m", "--", "-n"]),
    ],
)
def test_everything_after_the_script_belongs_to_it(farspan, words, expected):
    result = farspan("run", "-n", "2", *words)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"0 {expected} None None\n"


def test_options_reach_the_processes(farspan, tmp_path):
    result = farspan("run", "--verbose", "--num-processes=2", "--log-dir", "logs", "--report", "r.html", "train.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"0 [] {tmp_path / 'r.html'} 1\n"
    assert (tmp_path / "logs" / "rank1.log").read_text() == f"1 [] {tmp_path / 'r.html'} 1\n"
    assert str(tmp_path / "logs") in result.stderr


@pytest.mark.parametrize(("words", "seed"), [([], None), (["--sanitize"], "1"), (["--sanitize=7"], "7")])
def test_the_seed_of_sanitize_reaches_the_processes(farspan, tmp_path, words, seed):
    (tmp_path / "show.py").write_text("import os; print(os.environ.get('FARSPAN_SANITIZE'))")
    result = farspan("run", "-n", "2", *words, "show.py")
    assert (result.returncode, result.stdout) == (0, f"{seed}\n"), result.stderr


def test_exit_code_is_passed_on(farspan, tmp_path):
    (tmp_path / "fail.py").write_text("import sys; sys.exit(5)")
    assert farspan("run", "-n", "2", "fail.py").returncode == 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-n", "2", "absent.py"], "there is no script absent.py"),
        (["--", "-n", "2"], "-n is missing"),
        (["-n", "0", "train.py"], "'0' is not a whole number from 1 to 4096"),
        (["-n", "99999999999999999999", "train.py"], "not a whole number"),
        (["-n", "\u0662", "train.py"], "not a whole number"),
        (["-n", "2", "--what", "train.py"], "unrecognized arguments: --what"),
        (["-n", "2", "--files", "some", "train.py"], "invalid choice: 'some'"),
        (["-n", "2", "--report", "r.txt", "train.py"], "r.txt is no report"),
        (["-n", "2"], "no script to run"),
        (["-n", "2", "-m"], "-m needs the name of a module"),
        (["train.py", "-n", "2"], "-n is missing"),
        (["-n", "2", "--report", "no/such/r.html", "train.py"], "cannot be written"),
    ],
)
def test_bad_use_is_told_in_three_parts(farspan, words, says):
    result = farspan("run", *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(("LaunchError: ", "FarspanError: ")) and says in result.stderr
    assert "\n  why  " in result.stderr and "\n  try  " in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 8


@pytest.mark.parametrize(
    ("line", "what", "hint"),
    [
        ("run --processes 2 train.py", "farspan run: unrecognized arguments: --processes.", "-n, --num-processes"),
        ("run -n 2 --max_restart=3 train.py", "farspan run: unrecognized arguments", "--max-restarts"),
        ("run --nproc-per-node 2 train.py", "farspan run: unrecognized arguments", "-n, --num-processes"),
        ("run --nproc_per_node=2 train.py", "farspan run: unrecognized arguments", "-n, --num-processes"),
        ("plan --nproc-per-node 2 train.py", "farspan plan: unrecognized arguments", "farspan plan --help"),
        ("plan --stage 2 train.py", "farspan plan: unrecognized arguments: --stage.", "--stages"),
        ("ckpt ls --jsn checkpoints", "farspan ckpt ls: unrecognized arguments: --jsn.", "--json"),
        ("rnu -n 2 train.py", "'rnu' is no command", "farspan run -n 2 train.py"),
        ("train.py --lr 1", "'train.py' is no command", "farspan run -n 2 train.py --lr 1"),
        ("other.py --lr 1", "'other.py' is no command", "farspan --help"),
        ("-n 2 train.py", "farspan has no option '-n'", "farspan run -n 2 train.py"),
        ("--verbose run -n 2 train.py", "farspan has no option '--verbose'", "farspan run --verbose -n 2 train.py"),
        ("run 2 train.py --lr 1", "how many processes?", "farspan run -n 2 train.py --lr 1"),
        ("run --join a:29400 train.py", "how many processes?", "farspan run -n 4 --join a:29400 train.py"),
    ],
)
def test_bad_use_names_the_command_and_what_was_probably_meant(tmp_path, monkeypatch, capsys, line, what, hint):
    (tmp_path / "train.py").write_text(SHOW)
    monkeypatch.chdir(tmp_path)
    assert main_module.main(line.split()) == 2
    said = capsys.readouterr().err.splitlines()
    assert what in said[0] and said[1].startswith("  why  ") and said[2].startswith(f"  try  {hint}")
    assert len(said) == 3


def test_report_explains_and_draws_a_step(farspan, tmp_path):
    from tests.report.test_report_measured import ROWS, step

    (tmp_path / "step.json").write_text(step(ROWS).to_json())
    done = farspan("report", "step.json", "--html", "step.html", "--perfetto", "trace.json")
    assert done.returncode == 0, done.stderr
    assert "waiting for a late stage" in done.stdout and done.stdout.startswith("planned\nrank 0")
    page = (tmp_path / "step.html").read_text()
    assert page.index("Planned") < page.index("Measured") < page.index("Where the time went")
    assert "traceEvents" in (tmp_path / "trace.json").read_text()


def test_report_of_another_file_is_refused(farspan, tmp_path):
    (tmp_path / "other.json").write_text("{}")
    done = farspan("report", "other.json")
    assert done.returncode == 2
    assert "other.json is not a step of farspan" in done.stderr and "  try  farspan run" in done.stderr


def test_a_setting_of_another_kind_is_refused_before_any_rank_starts(farspan, monkeypatch):
    monkeypatch.setenv("FARSPAN_DEADLINE", "soon")
    result = farspan("run", "-n", "2", "train.py")
    assert (result.returncode, result.stdout) == (2, "")
    assert "FARSPAN_DEADLINE='soon' is not a number of seconds" in result.stderr

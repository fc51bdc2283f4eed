"""`farspan.launch(function, processes=2)`: ranks that are forks of a session."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import ClassVar

import pytest
from tests.support.launcher import SOURCE, TIMEOUT_S

import farspan
from farspan.errors import LaunchError

TRAINS = """
import os, sys, torch, farspan
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 64)
nn.Linear(64, 64)(x).sum().backward()  # the session has computed before
model, losses = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), []

def train(num_steps, *, name, distribute=farspan.distribute):
    net = distribute(model) if distribute else model
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(num_steps):
        if name == "fails" and step and farspan.rank() == 1:
            raise ValueError("boom")
        optimizer.zero_grad()
        loss = net(x[:4, :8]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(name, losses, os.environ.get("FARSPAN_WORLD_SIZE"), flush=True)
"""


def session(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "2"} | variables
    environment.pop("FARSPAN_RECORD", None)
    command = [sys.executable, "-c", TRAINS + program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def test_a_function_of_a_session_runs_in_several_ranks_with_the_numbers_of_one() -> None:
    done = session(
        "farspan.launch(train, 3, name='ours', processes=2)\n"
        "train(3, name='ours', distribute=None)\n"
        "print('here', len(losses), 'FARSPAN_RANK' in os.environ)\n"
        "try: farspan.launch(train, 2, name='fails', processes=2)\n"
        "except Exception as error: print(type(error).__name__, error.what)\n"
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0].endswith(" 2") and lines[1].endswith(" None")
    assert lines[0].removesuffix(" 2") == lines[1].removesuffix(" None")  # bit for bit
    assert lines[2] == "here 3 False"
    assert lines[-1] == "LaunchError rank 1 of 2 failed: exit code 1."
    assert "ValueError: boom" in done.stderr
    assert "RemoteError: rank 1" in done.stderr  # rank 0 hears it, and takes it for no divergence
    assert "DivergenceError" not in done.stderr


def test_output_and_errors_are_where_a_notebook_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    def cell() -> None:
        print("rank", os.environ["FARSPAN_RANK"])
        if os.environ["FARSPAN_RANK"] == "0":
            raise KeyError("missing")

    with pytest.raises(LaunchError, match=r"rank 0 of 2 failed: exit code 1\."):
        farspan.launch(cell, processes=2)
    shown = capsys.readouterr()
    assert shown.out == "rank 0\n" and shown.err.count("KeyError: 'missing'") == 2  # its traceback, and the last word


def test_a_cell_of_a_notebook_runs_in_several_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}

    class Shell:
        user_ns: ClassVar = {"number": 3}

        def transform_cell(self, cell: str) -> str:
            return cell

        def register_magic_function(self, function, kind: str, name: str) -> None:
            found[kind, name] = function

    farspan.load_ipython_extension(Shell())
    found["cell", "farspan"]("-n 2", "import os\nprint(number + 1, os.environ['FARSPAN_WORLD_SIZE'])\nnumber = 9\n")
    assert capsys.readouterr().out == "4 2\n" and Shell.user_ns["number"] == 3
    with pytest.raises(LaunchError, match="says no number of processes"):
        found["cell", "farspan"]("4", "")


@pytest.mark.parametrize("number", [0, -1, True, "2", 2.0, 10**9])
def test_what_is_no_number_of_processes_is_refused(number) -> None:
    with pytest.raises(LaunchError, match="cannot start"):
        farspan.launch(print, processes=number)


def test_a_rank_starts_no_ranks_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match="failed: exit code 1"):
        farspan.launch(lambda: farspan.launch(print, processes=2), processes=2)
    assert "this process is rank 0 of 2 itself." in capsys.readouterr().err


def test_a_fork_ends_as_a_program_does_and_never_as_its_session() -> None:
    done = session(
        "import threading\n"
        "def late(): threading.Timer(0.3, print, ['late, caf\\u00e9']).start()\n"
        "def closed(): sys.stdout.close()\n"
        "for end in (late, closed, lambda: sys.exit('a last word'), lambda: sys.exit(2**40 + 7)):\n"
        "    try: farspan.launch(end, processes=1)\n"
        "    except farspan.errors.LaunchError as error: print(error.what)\n"
        "print('over')\n",
        PYTHONIOENCODING="ascii",
    )
    codes = [f"rank 0 of 1 failed: exit code {code}." for code in (1, 7)]
    assert done.stdout.splitlines() == ["late, caf\\xe9", *codes, "over"] and "a last word\n" in done.stderr

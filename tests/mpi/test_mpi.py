"""Training inside of a program that has called MPI_Init, by a real mpirun: `make test-mpi`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import ROOT, SOURCES, Finished, run_processes

PROGRAMS = Path(__file__).parent / "programs"
MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
LIMIT_S = 300.0
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None or MPIRUN is None, reason="make test-mpi"),
    pytest.mark.timeout(700),
]


def mpirun(num_ranks: int, program: Path, *words: str, **variables: str) -> Finished:
    """Run a program by mpirun; none of its processes is left behind."""
    assert MPIRUN is not None
    command = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks), sys.executable, str(program)]
    if os.getuid() == 0:
        command.insert(1, "--allow-run-as-root")
    kept = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([SOURCES, ROOT]), **variables}
    began = time.monotonic()
    done = subprocess.run(
        [*command, *words], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    duration_s = time.monotonic() - began
    return Finished(code=done.returncode, stdout=done.stdout, stderr=done.stderr, duration_s=duration_s)


WIDE = {"0": "rank:0+rank:1", "*": "rank:0+rank:1", "16": "rank:2"}
CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"measure": True}),
    (3, {"measure": False}),
    (3, {"plan": WIDE}),
    (3, {"data_parallel": 3}),
    (4, {"data_parallel": 2}),
    (2, {"tensor_parallel": 2}),
]


@pytest.mark.parametrize(("num_ranks", "words"), CASES)
def test_the_numbers_are_those_over_gloo(num_ranks: int, words: dict[str, Any]) -> None:
    over_mpi = mpirun(num_ranks, PROGRAMS / "train.py", json.dumps(words), "mpi")
    assert over_mpi.code == 0, over_mpi.stderr
    over_gloo = run_processes(
        num_ranks, PROGRAMS / "train.py", [json.dumps(words)], environment={"FARSPAN_SAME_HOST": "0"}
    )
    assert not any(each.code for each in over_gloo), over_gloo[0].stderr
    expected = sorted(line for each in over_gloo for line in each.stdout.splitlines() if line.startswith("["))
    assert len(expected) == words.get("data_parallel", 1)
    assert sorted(line for line in over_mpi.stdout.splitlines() if line.startswith("[")) == expected


@pytest.mark.parametrize("words", [[], ["finalize"]])
def test_some_ranks_train_and_the_program_uses_mpi_as_before(words: list[str]) -> None:
    done = mpirun(3, PROGRAMS / "beside.py", *words)
    assert done.code == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [
        "end",
        "end",
        "end",
        "heard: [(0, 0), (0, 1), (1, 0), (1, 1)]",
        *["other ranks: the ranks are those of another communicator: 2 then, 1 now."] * 2,
        "outside: this process is in no communicator: comm= is COMM_NULL.",
    ]


def test_an_exception_of_one_rank_ends_all() -> None:
    done = mpirun(2, PROGRAMS / "fault.py", "raises")
    assert done.code != 0
    assert done.stderr.count("ValueError: the disk is full\n") == 2, done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "RemoteError: rank 1 failed: ValueError: the disk is full" in done.stderr
    assert "MPI_Abort" not in done.stderr


def test_an_exception_ends_ranks_too_that_do_something_else() -> None:
    done = mpirun(3, PROGRAMS / "fault.py", "part")
    assert done.code != 0
    assert "RemoteError: rank 1 failed: ValueError: the disk is full" in done.stderr
    assert "rank 1 has failed, and ends the job (MPI_Abort)" in done.stderr


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("differs", "DivergenceError: the ranks' programs differ at step 2"),
        ("leaves", "DivergenceError: rank 1 has ended its program, rank 0 waits in step 2"),
        ("threads", "MPI was initialized with MPI_THREAD_FUNNELED, and farspan needs MPI_THREAD_MULTIPLE"),
    ],
)
def test_what_goes_wrong_has_a_name_on_every_rank(what: str, words: str) -> None:
    done = mpirun(2, PROGRAMS / "fault.py", what)
    assert done.code != 0
    assert done.stderr.count(words) >= 2, done.stderr


def test_a_communicator_on_some_ranks_only() -> None:
    done = mpirun(2, PROGRAMS / "fault.py", "some", FARSPAN_DEADLINE="5")
    assert done.code != 0
    assert "farspan.distribute(model, comm=MPI.COMM_WORLD)" in done.stderr, done.stderr
    assert "rank 0 waited 5 s for the other 1 ranks of its communicator to call farspan.distribute" in done.stderr


def test_the_example() -> None:
    done = mpirun(2, Path(ROOT) / "examples" / "simulate_and_train.py", "--steps", "20")
    assert done.code == 0, done.stderr
    assert "the heat that is left" in done.stdout

"""A rank that does not come to the rendezvous: the others name it, within seconds where anybody can know."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.support.launcher import TIMEOUT_S, Job
from tests.support.ranks import ROOT, SOURCES, free_port, run_processes
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from farspan.comm.rendezvous.group import Peers
from farspan.comm.rendezvous.records import Records
from farspan.errors import DeadlineError, RemoteError
from farspan.launch.rank.error_file import leave_error
from farspan.torch_private.groups import FileStore, PrefixStore

DISTRIBUTES = """
import farspan
from torch import nn
farspan.distribute(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
"""
WAITS_UNTIL = "while not any(name.startswith('{note}') for name in os.listdir(os.environ['FARSPAN_RUN_FOLDER'])):\n"
WAITS_UNTIL += "    time.sleep(0.01)\n"


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.close()


@pytest.mark.parametrize(("leaves", "others_wait", "n"), [("sys.exit()", False, 3), ("os._exit(0)", True, 2)])
def test_farspan_run_names_a_rank_that_ends_before_the_others_have_found_it(job, leaves, others_wait, n):
    before = WAITS_UNTIL.format(note="waiting-" if others_wait else "ended-")
    script = "if rank == 1:\n" + ("    " + before.replace("\n", "\n    ") if others_wait else "    ") + f"{leaves}\n"
    script += ("" if others_wait else before) + DISTRIBUTES
    code, _, err = job.run(script, n)
    assert code == 1
    assert f"rank 1 of {n} ended before it called farspan.distribute" in err.splitlines()[-4]


def test_farspan_run_ends_who_waits_for_a_rank_that_failed(job):
    script = (
        "if rank == 1:\n    "
        + WAITS_UNTIL.format(note="waiting-").replace("\n", "\n    ")
        + "raise ValueError('no data')\n"
    )
    code, _, err = job.run(script + DISTRIBUTES)
    assert code == 1
    assert "rank 1 of 2 failed: exit code 1" in err and "ValueError: no data" in err


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_under_torchrun_a_rank_leaves_word_when_it_ends(tmp_path: Path, num_ranks: int) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nimport farspan\nif os.environ['RANK'] == '1': sys.exit()\n" + DISTRIBUTES)
    command = [
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={num_ranks}",
        f"--master-port={free_port()}",
        str(script),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCES, ROOT]), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode != 0
    assert "RemoteError: rank 1 ended before it called farspan.distribute" in done.stderr
    cause = done.stderr.rpartition("Root Cause (first observed failure):")[2]
    assert "rank 1 ended before it called farspan.distribute" in cause
    assert time.monotonic() - began < 100  # the deadline is 300 s


def test_ranks_that_do_not_come_are_named_at_the_deadline(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\nif os.environ['RANK'] == '2': os.kill(os.getpid(), signal.SIGSTOP)\n" + DISTRIBUTES
    )
    first, second, _ = run_processes(3, script, environment={"FARSPAN_DEADLINE": "3"}, stops=2)
    assert "waited 3 s for rank 2 to call farspan.distribute" in first.stderr
    assert "rank 2 to call farspan.distribute" in second.stderr  # by rank 0's word, or by its own deadline


def file_records(tmp_path: Path, limit_s: float) -> Records:
    """Of rank 1 of 3, under farspan run."""
    store = PrefixStore("farspan", FileStore(str(tmp_path / "store"), 3))
    return Records(Peers(rank=1, world_size=3, store=store, host="127.0.0.1", launcher="run"), limit_s)


def test_ranks_that_do_not_come_are_named_where_the_store_is_a_file(tmp_path: Path) -> None:
    records = file_records(tmp_path, 0.2)
    records.write("rank 1", {})
    with pytest.raises(DeadlineError, match=r"rank 1 waited 0.2 s for ranks 0, 2 to call farspan.distribute"):
        records.read("hub", 0)


def test_a_rank_that_comes_late_is_waited_for_where_the_store_is_a_file(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("farspan.comm.rendezvous.records._LONG_S", 0.1)
    records = file_records(tmp_path, 20.0)
    records.write("rank 1", {})
    coming = threading.Timer(1.5, lambda: file_records(tmp_path, 20.0).write("hub", {"port": 1}))
    coming.start()  # torch counts the seconds of a wait for a file in whole ones
    assert records.read("hub", 0) == {"port": 1}
    coming.join()
    assert "rank 1 waits for ranks 0, 2 to call farspan.distribute" in capsys.readouterr().err


def test_rank_0_having_failed_stays_until_those_who_have_come_know_why(tmp_path: Path, monkeypatch) -> None:
    error_file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    store = HashStore()
    first, second = (
        Records(Peers(rank=rank, world_size=3, store=store, host="127.0.0.1", launcher="srun"), 20.0) for rank in (0, 1)
    )
    second.write("rank 1", {})
    found: list[str] = []

    def read() -> None:
        with pytest.raises(RemoteError, match="no data"):
            second.read("hub", 0)
        found.append(error_file.read_text())  # rank 0 may be ended from now on

    reading = threading.Timer(0.5, read)
    reading.start()
    with pytest.raises(ValueError, match="no data"), first.leaving_errors("hub"):
        raise ValueError("no data")
    assert store.check(["heard 1"])
    reading.join()
    assert "ValueError: no data" in found[0]


def test_torchrun_s_error_file_has_the_first_error_and_dates_later_what_was_heard(tmp_path: Path, monkeypatch) -> None:
    times: list[int] = []
    for is_heard in (False, True):
        file = tmp_path / f"error-{is_heard}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        leave_error(ValueError("no data"), is_heard=is_heard)
        leave_error(ValueError("another one"), is_heard=is_heard)
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
        assert json.loads(file.read_text())["message"]["message"] == "ValueError: no data"
        times.append(failure.timestamp)
        assert [path.name for path in tmp_path.glob(f"*{is_heard}*")] == [file.name]  # renamed: it is never half there
    assert times[1] - times[0] >= 5
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no folder" / "error.json"))
    leave_error(ValueError("nowhere to write"), is_heard=False)

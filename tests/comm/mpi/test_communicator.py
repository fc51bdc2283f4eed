"""What is given as `comm` is checked before anything is sent."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from farspan.comm.mpi.communicator import check_communicator, is_in_mpi
from farspan.errors import PlanError


class Comm:
    def __init__(self, name: str = "world") -> None:
        self.name = name

    def Is_inter(self) -> bool:  # noqa: N802  the name is MPI's
        return self.name == "inter"


NULL = Comm("null")


def module(monkeypatch: pytest.MonkeyPatch, *, level: int = 3, is_initialized: bool = True, ended: bool = False) -> Any:
    made = SimpleNamespace(
        Comm=Comm,
        COMM_NULL=NULL,
        COMM_WORLD=SimpleNamespace(Get_size=lambda: 1),
        Is_initialized=lambda: is_initialized,
        Is_finalized=lambda: ended,
        Query_thread=lambda: level,
        THREAD_SINGLE=0,
        THREAD_FUNNELED=1,
        THREAD_SERIALIZED=2,
        THREAD_MULTIPLE=3,
    )
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", made)
    return made


def test_a_communicator_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module(monkeypatch)
    assert check_communicator(Comm()) is made
    assert is_in_mpi()


def test_without_mpi4py_nothing_is_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert not is_in_mpi()
    with pytest.raises(PlanError, match="takes a communicator of mpi4py, not 3"):
        check_communicator(3)
    assert "mpi4py" not in sys.modules


@pytest.mark.parametrize(
    ("comm", "words"),
    [("world", "takes a communicator of mpi4py, not 'world'"), (NULL, "COMM_NULL"), (Comm("inter"), "Merge")],
)
def test_what_is_no_communicator_of_these_ranks(monkeypatch: pytest.MonkeyPatch, comm: object, words: str) -> None:
    module(monkeypatch)
    with pytest.raises(PlanError, match=words):
        check_communicator(comm)


def test_mpi_must_be_initialized_and_ready_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, is_initialized=False)
    with pytest.raises(PlanError, match="MPI is not initialized"):
        check_communicator(Comm())
    module(monkeypatch, ended=True)
    with pytest.raises(PlanError, match="MPI has been finalized"):
        check_communicator(Comm())
    module(monkeypatch, level=1)
    with pytest.raises(PlanError, match=r"MPI_THREAD_FUNNELED(.|\n)*mpi4py.rc.thread_level = 'multiple'"):
        check_communicator(Comm())


def test_processes_of_another_launcher_are_no_ranks_of_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch)
    variables = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(PlanError, match="MPI knows of one process, but another launcher has started 4"):
        check_communicator(Comm())

"""Every launcher's variables are read alike, and bad ones are refused with what to do."""

from __future__ import annotations

import pytest

from farspan.errors import LaunchError
from farspan.launch.environment import Environment, launch_variables, read_environment

MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
FULL = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"} | MASTER


def numbers(environment: Environment) -> tuple[int, int, int, int]:
    e = environment
    return (e.rank, e.world_size, e.local_rank, e.local_world_size)


def test_nothing_set_is_one_process():
    assert read_environment({}) == Environment()
    assert numbers(read_environment({})) == (0, 1, 0, 1)


def test_reads_the_process_environment_by_default(monkeypatch):
    for name, text in FULL.items():
        monkeypatch.setenv(name, text)
    assert numbers(read_environment()) == (3, 8, 1, 2)


OURS = {f"FARSPAN_{name}": text for name, text in FULL.items() if name not in MASTER} | {"FARSPAN_STORE": "/run/store"}


@pytest.mark.parametrize(
    ("given", "launcher"),
    [(OURS, "run"), (FULL | {"TORCHELASTIC_RUN_ID": "x"}, "torchrun"), (FULL, "plain")],
)
def test_rank_and_world_size(given, launcher):
    environment = read_environment(given)
    assert numbers(environment) == (3, 8, 1, 2)
    assert environment.launcher == launcher
    rendezvous = (environment.master_addr, environment.master_port, environment.store)
    assert rendezvous == ((None, None, "/run/store") if launcher == "run" else ("node1", 29500, None))


def test_all_on_one_machine_where_nobody_says():
    assert numbers(read_environment({"RANK": "1", "WORLD_SIZE": "4"} | MASTER)) == (1, 4, 1, 4)


def test_open_mpi():
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    given = {f"OMPI_COMM_WORLD_{name}": text for name, text in zip(names, "5822", strict=True)}
    given["OMPI_COMM_WORLD_LOCAL_SIZE"] = "4"
    environment = read_environment(given | MASTER)
    assert numbers(environment) == (5, 8, 2, 4)
    assert environment.launcher == "openmpi"


def test_pmi():
    given = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    environment = read_environment(given | MASTER)
    assert numbers(environment) == (1, 2, 0, 1)
    assert environment.launcher == "pmi"


@pytest.mark.parametrize(
    ("tasks_per_node", "node", "local_world_size"),
    [
        ("4(x2),1", "1", 4),
        ("4(x2),1", "2", 1),
        ("4", "0", 9),
        ("4(x999999999999)", "0", 9),
        ("4(x999999)," * 20 + "1", "0", 9),
        ("4(x2),1", "9" * 5000, 9),
        ("\u0664(x2),1", "0", 9),
    ],
)
def test_srun(tasks_per_node, node, local_world_size):
    given = {"SLURM_PROCID": "5", "SLURM_NTASKS": "9", "SLURM_LOCALID": "0"}
    given |= {"SLURM_TASKS_PER_NODE": tasks_per_node, "SLURM_NODEID": node}
    environment = read_environment(given | MASTER)
    assert numbers(environment) == (5, 9, 0, local_world_size)
    assert environment.launcher == "slurm"


def test_one_task_of_slurm_is_one_process():
    assert numbers(read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})) == (0, 1, 0, 1)


def test_shell_in_an_allocation_is_one_process():
    assert numbers(read_environment({"SLURM_NTASKS": "8"})) == (0, 1, 0, 1)
    step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}
    assert numbers(read_environment(step)) == (0, 1, 0, 1)


def test_mpirun_in_a_batch_script_is_not_taken_for_srun():
    inherited = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    own = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
    assert read_environment(inherited | own | MASTER).rank == 2


def test_farspan_run_in_an_allocation_is_not_taken_for_srun():
    assert read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "RANK": "0", "WORLD_SIZE": "1"} | OURS).rank == 3


def test_what_any_launcher_sets_is_known():
    others = {"TORCHELASTIC_RUN_ID", "GROUP_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "SLURM_PROCID", "SLURM_NTASKS"}
    known = {*FULL, *OURS, *others}
    assert set(launch_variables([*known, "HOME", "SLURM_JOB_ID", "FARSPAN_REPORT"])) == known


def test_empty_variables_count_as_not_set():
    assert numbers(read_environment({"RANK": "", "WORLD_SIZE": " "})) == (0, 1, 0, 1)


def test_one_process_needs_no_address():
    environment = read_environment({"RANK": "0", "WORLD_SIZE": "1"})
    assert (environment.world_size, environment.master_addr) == (1, None)
    assert numbers(read_environment({"WORLD_SIZE": "1"})) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"} | MASTER, "RANK is not set"),
        ({"SLURM_PROCID": "0"}, "SLURM_NTASKS"),
        ({"PMI_RANK": "0"}, "PMI_SIZE is not set"),
        (FULL | {"RANK": "8"}, "rank 8 of 8"),
        (FULL | {"RANK": "-1"}, "RANK is not a whole number"),
        (FULL | {"RANK": "two"}, "RANK='two'"),
        (FULL | {"WORLD_SIZE": "4.0"}, "WORLD_SIZE='4.0'"),
        (FULL | {"WORLD_SIZE": "0"}, "WORLD_SIZE is not a whole number from 1"),
        (FULL | {"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='9999"),
        (FULL | {"WORLD_SIZE": "1000000000"}, "from 1 to 65536"),
        (FULL | {"RANK": "\u0663"}, "RANK is not a whole number"),
        (FULL | {"RANK": "1_0"}, "RANK is not a whole number"),
        (FULL | {"MASTER_PORT": "9" * 5000}, "MASTER_PORT is not a whole number"),
        (FULL | {"MASTER_ADDR": "a host"}, "MASTER_ADDR is no host"),
        (FULL | {"MASTER_ADDR": "\x1b[2J"}, r"MASTER_ADDR='\x1b[2J'"),
        (FULL | {"MASTER_ADDR": "a" * 300}, "MASTER_ADDR is no host"),
        (FULL | {"LOCAL_RANK": "2"}, "local rank 2 of 2"),
        (FULL | {"LOCAL_WORLD_SIZE": "9"}, "local rank 1 of 9"),
        (FULL | {"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        (FULL | {"MASTER_PORT": "70000"}, "from 1 to 65535"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "but MASTER_PORT not set"),
        ({"FARSPAN_RANK": "0", "FARSPAN_WORLD_SIZE": "2"} | MASTER, "but FARSPAN_STORE not set"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "scontrol show hostnames"),
    ],
)
def test_bad_variables_are_refused_with_what_to_do(given, says):
    with pytest.raises(LaunchError) as caught:
        read_environment(given)
    assert says in str(caught.value)
    assert caught.value.why and caught.value.hint
    assert len(str(caught.value).splitlines()) <= 8

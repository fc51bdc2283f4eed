"""Reads from the launchers' environment variables which process of how many this is.

    launcher                     rank, world size, local rank, local world size
    farspan run                  FARSPAN_RANK, _WORLD_SIZE, _LOCAL_RANK, _LOCAL_WORLD_SIZE
    torchrun, by hand            RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE
    Open MPI                     OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    MPICH, Intel MPI             PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    srun                         SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_TASKS_PER_NODE
    nothing of these             0, 1, 0, 1

The first row that is there wins; with it the address of rank 0, MASTER_ADDR and MASTER_PORT, or for farspan run
FARSPAN_STORE, a file on one machine, and on several tcp://ADDRESS:PORT. farspan run hides the variables of all other
rows from the script, which is to see one process. SLURM comes last because its variables are inherited: `mpirun`,
called from a batch script, hands the script's own SLURM_PROCID=0 to every rank of that machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from farspan.errors import LaunchError, quoted
from farspan.settings import PREFIX
from farspan.units import MAX_COUNT, parse_count

__all__ = ["Environment", "hosts_store", "launch_variables", "read_environment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The place of this process among all processes of the job.

    Attributes:
        rank: Number of this process, 0 <= rank < world_size.
        world_size: Number of processes of the job.
        local_rank: Number of this process among those of its machine.
        local_world_size: Number of processes on its machine; the world size where no launcher said it.
        launcher: "run" (farspan run on one machine), "hosts" (on several), "torchrun", "plain" (RANK set by something
            else), "openmpi", "pmi", "slurm", or "none".
        master_addr: Host at which rank 0 listens; None where the world size is 1, or there is a `store`.
        master_port: Its port; None as well.
        store: A file by which the processes of one machine find each other, where the launcher gives one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "none"
    master_addr: str | None = None
    master_port: int | None = None
    store: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Names of one launcher's variables; of several names for one thing the first that is set counts."""

    launcher: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: str
    local_world_size: str
    rendezvous: tuple[str, ...] = ("MASTER_ADDR", "MASTER_PORT")
    """The variables that say where the processes find each other: an address and a port, or a file."""


_SOURCES = (
    _Source(
        launcher="run",
        rank=f"{PREFIX}RANK",
        world_size=(f"{PREFIX}WORLD_SIZE",),
        local_rank=f"{PREFIX}LOCAL_RANK",
        local_world_size=f"{PREFIX}LOCAL_WORLD_SIZE",
        rendezvous=(f"{PREFIX}STORE",),
    ),
    _Source(
        launcher="plain",
        rank="RANK",
        world_size=("WORLD_SIZE",),
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
    ),
    _Source(
        launcher="openmpi",
        rank="OMPI_COMM_WORLD_RANK",
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Source(
        launcher="pmi",
        rank="PMI_RANK",
        world_size=("PMI_SIZE",),
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
    ),
    _Source(
        launcher="slurm",
        rank="SLURM_PROCID",
        # The step's own count first: inside an interactive step the job may have more tasks than the step.
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        local_rank="SLURM_LOCALID",
        local_world_size="",  # SLURM says it for all machines at once: see _slurm_tasks_here
    ),
)

_TCP_STORE = re.compile(r"tcp://([0-9A-Za-z._-]{1,255}|[0-9A-Fa-f:.%]{2,255}):([0-9]{1,5})")
_WITH_MPI = "from mpi4py import MPI\nfarspan.distribute(model, comm=MPI.COMM_WORLD)      or, without MPI:\n"
_MASTER_HINTS = {
    "openmpi": _WITH_MPI + "mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 ...",
    "pmi": _WITH_MPI + "mpirun -genv MASTER_ADDR $(hostname) -genv MASTER_PORT 29500 ...",
    "slurm": 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
    "export MASTER_PORT=29500          before srun\n"
    "srun --ntasks 1 ...               if one process was meant",
}
_START_HINT = "farspan run -n 4 train.py          on one machine, or torchrun, srun, mpirun"


def read_environment(variables: Mapping[str, str] | None = None, *, needs_rendezvous: bool = True) -> Environment:
    """Reads the place of this process from the variables that its launcher set.

    Args:
        variables: What to read instead of `os.environ`. An empty variable counts as not set.
        needs_rendezvous: Whether several processes must say where they find each other.

    Raises:
        LaunchError: The variables are incomplete, contradict each other, or are not numbers.

    >>> read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).world_size
    1
    >>> read_environment({}).launcher
    'none'
    """
    everything = os.environ if variables is None else variables
    given = {name: text for name, text in everything.items() if text.strip()}
    source = _pick_source(given)
    if source is None:
        return Environment(**_read_rendezvous(given, _SOURCES[-1]))
    launcher = source.launcher
    if launcher == "plain" and "TORCHELASTIC_RUN_ID" in given:
        launcher = "torchrun"
    size_name = next(name for name in source.world_size if name in given)
    world_size = _read_integer(given, size_name, least=1)
    rank = _read_integer(given, source.rank, least=0) if source.rank in given else 0
    if rank >= world_size:
        raise LaunchError(
            f"rank {rank} of {world_size} processes cannot be: ranks count from 0.",
            why=f"{source.rank}={rank} and {size_name}={world_size} (launcher: {launcher}).",
            hint=f"{source.rank}=0 to {source.rank}={world_size - 1}, or {size_name}={rank + 1}",
        )
    local_rank, local_world_size = _read_local(given, source, rank, world_size)
    missing = [name for name in source.rendezvous if name not in given]
    if world_size > 1 and missing and needs_rendezvous:
        raise LaunchError(
            f"the {world_size} processes cannot find each other.",
            why=f"{size_name}={world_size}, but {' and '.join(missing)} not set (launcher: {launcher}).",
            hint=_MASTER_HINTS.get(launcher, "export MASTER_ADDR=<host of rank 0> MASTER_PORT=29500\n" + _START_HINT),
        )
    found: dict[str, Any] = {"launcher": launcher, **_read_rendezvous(given, source)}
    return Environment(
        rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size, **found
    )


def hosts_store(environment: Environment) -> bool:
    """Returns whether this process is to host the store by which the ranks find each other; torchrun hosts its own."""
    is_agents = environment.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return environment.rank == 0 and not is_agents


def launch_variables(names: Iterable[str]) -> list[str]:
    """Returns those of `names` with which a launcher gives a process its place."""
    known = {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"}  # torchrun's
    known |= {f"{PREFIX}ROLE", f"{PREFIX}SERVICES", f"{PREFIX}HOSTS"}
    for source in _SOURCES:
        known |= {source.rank, *source.world_size, source.local_rank, source.local_world_size, *source.rendezvous}
    return [name for name in names if name in known or name.startswith("TORCHELASTIC_")]


def _pick_source(given: Mapping[str, str]) -> _Source | None:
    partial: LaunchError | None = None
    for source in _SOURCES:
        size_name = next((name for name in source.world_size if name in given), None)
        if source.rank in given and size_name is not None:
            return source
        if source.rank in given:
            there, missing = source.rank, " or ".join(source.world_size)
        elif size_name is not None and source.launcher != "slurm":
            # Not SLURM: the shell of an allocation knows its number of tasks, but is none of them.
            if given[size_name].strip() == "1":
                return source
            there, missing = size_name, source.rank
        else:
            continue
        error = LaunchError(
            f"{missing} is not set.",
            why=f"{there}={quoted(given[there])} is: which process of how many this is needs both.",
            hint=f"set it too, or unset {there} for one process\n{_START_HINT}",
        )
        if source.launcher in ("run", "plain"):  # somebody set it for us: do not guess from other variables
            raise error
        partial = partial or error
    if partial is not None:
        raise partial
    return None


def _read_local(given: Mapping[str, str], source: _Source, rank: int, world_size: int) -> tuple[int, int]:
    """Local rank and local world size; all on one machine where the launcher does not say."""
    size: int | None = None
    if source.launcher == "slurm":
        size = _slurm_tasks_here(given, world_size)
    elif source.local_world_size in given:
        size = _read_integer(given, source.local_world_size, least=1)
    local_world_size = world_size if size is None else size
    if source.local_rank in given:
        local_rank = _read_integer(given, source.local_rank, least=0)
    else:
        local_rank = rank % local_world_size
    if local_rank >= local_world_size or local_world_size > world_size or local_rank > rank:
        raise LaunchError(
            f"local rank {local_rank} of {local_world_size} does not fit rank {rank} of {world_size}.",
            why=f"{source.local_rank}={given.get(source.local_rank, 'not set').strip()}, "
            f"{source.local_world_size or 'SLURM_TASKS_PER_NODE'} says {local_world_size}.",
            hint="unset both to have all processes on one machine\n" + _START_HINT,
        )
    return local_rank, local_world_size


def _slurm_tasks_here(given: Mapping[str, str], world_size: int) -> int | None:
    """Returns tasks on this machine, from SLURM's list for all of them: "4(x2),1" is 4, 4 and 1."""
    text = given.get("SLURM_STEP_TASKS_PER_NODE") or given.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        if match is None or len(counts) > world_size:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = parse_count(given.get("SLURM_NODEID", "0").strip())
    # A list that does not add up belongs to the job, not to this step.
    if sum(counts) != world_size or node is None or not 0 <= node < len(counts):
        return None
    return counts[node]


def _read_rendezvous(given: Mapping[str, str], source: _Source) -> dict[str, Any]:
    """`store`, or `master_addr` and `master_port`, of an `Environment`."""
    first, *port = source.rendezvous
    if not port:
        match = _TCP_STORE.fullmatch(given.get(first, ""))
        if match is None:
            return {"store": given.get(first)}
        return {"launcher": "hosts", "master_addr": match[1].strip("[]"), "master_port": int(match[2])}
    host = given[first].strip() if first in given else None
    if host is not None and not re.fullmatch(r"[A-Za-z0-9._:%\[\]-]{1,255}", host):
        raise LaunchError(
            f"the variable {first} is no host.",
            why=f"{first}={quoted(host)} was set by the launcher or in the shell.",
            hint=f"export {first}=<host of rank 0>",
        )
    number = _read_integer(given, port[0], least=1, most=65535) if port[0] in given else None
    return {"master_addr": host, "master_port": number}


def _read_integer(given: Mapping[str, str], name: str, *, least: int, most: int = MAX_COUNT) -> int:
    text = given[name].strip()
    value = parse_count(text)
    if value is None or not least <= value <= most:
        raise LaunchError(
            f"the variable {name} is not a whole number from {least} to {most}.",
            why=f"{name}={quoted(text)} was set by the launcher or in the shell.",
            hint=f"unset {name}\n{_START_HINT}",
        )
    return value

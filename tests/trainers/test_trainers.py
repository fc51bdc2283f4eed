"""The trainers people have, unmodified, with one line added: the numbers of one process, from 2 and 3."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import ROOT, SOURCES, free_port, run_processes

for package in ("accelerate", "lightning", "peft", "transformers"):
    pytest.importorskip(package)
pytestmark = pytest.mark.timeout(600)

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 280.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "FARSPAN_DEADLINE": "120"}
_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_Launch = Callable[[str, list[str]], None]


def plain_variables(num_ranks: int) -> _Launch:
    def launch(program: str, arguments: list[str]) -> None:
        finished = run_processes(
            num_ranks, PROGRAMS / program, arguments, timeout_s=TIMEOUT_S, environment=dict(OFFLINE)
        )
        assert [process.stderr[-4000:] for process in finished if process.code] == []

    return launch


def torchrun(num_ranks: int) -> _Launch:
    port = ["--nproc-per-node", str(num_ranks), "--master-port", str(free_port())]
    return lambda program, arguments: start("-m", "torch.distributed.run", *port, str(PROGRAMS / program), *arguments)


def farspan_run(num_ranks: int) -> _Launch:
    return lambda program, arguments: start(
        "-m", "farspan", "run", "-n", str(num_ranks), str(PROGRAMS / program), *arguments
    )


def start(*command: str) -> None:
    """Run Python without rank variables."""
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCH_VARIABLES}
    environment |= {**OFFLINE, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([SOURCES, ROOT])}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]


def outcomes(launch: _Launch, num_ranks: int, program: str, case: str, *more: str) -> list[dict[str, Any]]:
    """What each rank reports of its run."""
    with tempfile.TemporaryDirectory() as folder:
        launch(program, [case, folder, *more])
        return [json.loads((Path(folder) / f"outcome{rank}.json").read_text()) for rank in range(num_ranks)]


@functools.cache
def in_one_process(program: str, case: str) -> dict[str, Any]:
    return outcomes(lambda name, arguments: start(str(PROGRAMS / name), *arguments), 1, program, case)[0]


@pytest.mark.parametrize(
    ("program", "case", "launch", "num_ranks"),
    [
        ("hf_trainer.py", "gpt2", plain_variables, 2),
        ("hf_trainer.py", "gpt2", plain_variables, 3),
        ("hf_trainer.py", "early", plain_variables, 2),
        ("hf_trainer.py", "llama", torchrun, 2),
        ("hf_trainer.py", "lora", farspan_run, 2),
        ("accelerate_loop.py", "resumed", plain_variables, 2),
        ("accelerate_loop.py", "resumed", torchrun, 3),
        ("accelerate_loop.py", "bf16", farspan_run, 2),
        ("lightning_trainer.py", "trainer", plain_variables, 2),
        ("lightning_trainer.py", "trainer", torchrun, 3),
        ("lightning_trainer.py", "bf16", farspan_run, 2),
        ("lightning_trainer.py", "ddp", torchrun, 2),
        ("lightning_trainer.py", "fabric", plain_variables, 2),
        ("lightning_trainer.py", "fabric", torchrun, 2),
    ],
    ids=lambda item: getattr(item, "__name__", str(item)),
)
def test_the_same_log_rows_and_weights_as_in_one_process(
    program: str, case: str, launch: Callable[[int], _Launch], num_ranks: int
) -> None:
    wanted = in_one_process(program, case)
    found = outcomes(launch(num_ranks), num_ranks, program, case, "--farspan")
    for rank, got in enumerate(found):
        told = got.keys() - {"flushes", "files"}
        assert told >= {"rows", "weights"}
        for name in told:
            assert got[name] == wanted[name], f"{name} on rank {rank}"
        assert [training for training, _ in got["flushes"]] == [1] * len(wanted["flushes"]), got["flushes"]
    assert found[0]["files"] == wanted["files"]


@pytest.mark.parametrize(
    ("program", "case"), [("hf_trainer.py", "gpt2"), ("hf_trainer.py", "lora"), ("lightning_trainer.py", "trainer")]
)
def test_a_run_that_goes_on_from_a_checkpoint_equals_the_one_that_was_never_stopped(program: str, case: str) -> None:
    found = in_one_process(program, case)
    assert found["resumed"] == found["weights"]  # over several processes it equals this one


def test_states_saved_and_loaded_between_epochs_change_nothing() -> None:
    stopped, never_stopped = (in_one_process("accelerate_loop.py", case) for case in ("resumed", "plain"))
    assert stopped["weights"] == never_stopped["weights"] and stopped["rows"] == never_stopped["rows"]


@pytest.mark.parametrize(
    ("program", "case"),
    [
        ("hf_trainer.py", "gpt2"),
        ("hf_trainer.py", "lora"),
        ("accelerate_loop.py", "resumed"),
        ("lightning_trainer.py", "trainer"),
        ("lightning_trainer.py", "fabric"),
    ],
)
def test_only_rank_0_writes(program: str, case: str) -> None:
    first, second = outcomes(plain_variables(2), 2, program, case, "--farspan", "--apart")
    assert first["files"] and second["files"] == {}
    assert first["weights"] == second["weights"]


def test_a_trainer_that_has_split_data_or_wrapped_a_model_is_refused() -> None:
    for got in outcomes(plain_variables(2), 2, "too_late.py", "all"):
        sharded, wrapped, early, fsdp = got["texts"]
        assert "several processes before farspan.distribute" in sharded and "made a BatchSamplerShard" in sharded
        assert "several processes before farspan.distribute" in wrapped and "made a DistributedDataParallel" in wrapped
        assert "Trainer or Fabric for several processes exists" in early and "DDPStrategy" in early
        assert "strategy='fsdp' cannot train" in fsdp
        assert all("\n  why  " in text and "\n  try  " in text for text in got["texts"])
        assert got["strategy"] == "SingleDeviceStrategy"  # of one made afterwards, for two devices
        assert got["state"] == ["DistributedType.NO", 1, 0]  # of accelerate, set up before

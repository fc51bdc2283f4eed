"""farspan over emulated devices: bit for bit the plain program on one such device, without a race.

What does not hold yet is marked, each with the place in farspan that breaks it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.emulated.conftest import Ended, Run
from tests.emulated.test_kernels import TRAIN, assert_same

TWO_DEVICES = '{"": "rank:0/cuda:0", "layers.2": "rank:0/cuda:1", "layers.3": "rank:0/cuda:1"}'
SHORT = {"deadline_s": 10}
"""For what stands still."""


def same_as_plain(run: Run, folder: Path, words: str, far_words: str, ranks: int = 2, **settings: object) -> Ended:
    common = (TRAIN, "--device", "cuda:0", *words.split())
    devices = {key: value for key, value in settings.items() if key == "devices"}
    run(*common, "--save", folder / "plain.pt", **devices)
    ended = run(
        *common, "--farspan", *far_words.split(maxsplit=1), "--save", folder / "far.pt", ranks=ranks, **settings
    )
    assert_same(folder / "plain.pt", folder / "far.pt")
    assert ended.races == []
    assert len(ended.reports) >= ranks
    return ended


@pytest.mark.parametrize("words", ["--model mlp", "--model gpt --clip --pinned"])
def test_two_ranks(run: Run, tmp_path: Path, words: str) -> None:
    same_as_plain(run, tmp_path, words + " --measure no", "--set-device")


def test_two_ranks_whose_first_step_is_measured_and_whose_model_moves(run: Run, tmp_path: Path) -> None:
    same_as_plain(run, tmp_path, "--model mlp", "--set-device")


def test_two_ranks_where_torch_knows_the_devices_by_another_name(run: Run, tmp_path: Path) -> None:
    words = "--model mlp --measure no --device npu:0"
    same_as_plain(run, tmp_path, words, "--device npu:0", devices="npu:2")


def test_the_scalars_of_a_step_come_to_the_host_at_once(run: Run, tmp_path: Path) -> None:
    """Of three steps with four losses each, on the rank that has them; the other one has none."""
    ended = same_as_plain(run, tmp_path, "--model mlp --measure no --steps 3", "--set-device")
    waits = [report["counters"]["host_waits"] for report in ended.reports if report["counters"]["host_waits"]]
    of_scalars = [sum(n for where, n in each.items() if "execute/exchange.py" in where) for each in waits]
    assert sorted(of_scalars)[-1] == 3, waits


def test_one_process_with_two_devices(run: Run, tmp_path: Path) -> None:
    same_as_plain(run, tmp_path, "--model mlp", "--plan " + TWO_DEVICES, ranks=1)


CPU_AND_DEVICE = '{"": "rank:0/cuda:0", "layers.2": "rank:1/cpu", "layers.3": "rank:1/cpu"}'
HEAD_ON_THE_OTHER = '{"": "rank:0/cuda:0", "layers.3": "rank:0/cuda:1", "head": "rank:0/cuda:1"}'
BROKEN = {
    "no device set": (
        "execute/teams.py, worker_at: a rank alone is the current device of whoever asks, so both are on cuda:0",
        "--measure no",
        "--device cuda:0",
        2,
        SHORT,
    ),
    "without nccl": (
        "comm/router.py, transport_to: memory of a device goes to what reads it on the host",
        "--measure no",
        "--set-device",
        2,
        {"nccl": 0},
    ),
    "moved after": (
        "a recorded .to(device) of a parameter is predicted without gradient, or differs by its index",
        "--measure no --to after",
        "--set-device",
        2,
        SHORT,
    ),
    "stage on the cpu": (
        "execute/step/segment.py, _verify: the device of the model is predicted, not that of the stage",
        "",
        "--plan " + CPU_AND_DEVICE,
        2,
        SHORT,
    ),
    "targets elsewhere": (
        "execute/step/segment.py, _tensor_of: plain tensors are not brought to the device of their stage",
        "",
        "--plan " + HEAD_ON_THE_OTHER,
        1,
        SHORT,
    ),
}
"""What breaks, by name: the place and the cause; words of both programs, those of farspan's, ranks, settings."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xfail(reason=BROKEN[name][0])) for name in BROKEN]
)
def test_not_yet(run: Run, tmp_path: Path, name: str) -> None:
    _, words, far_words, ranks, settings = BROKEN[name]
    same_as_plain(run, tmp_path, "--model mlp " + words, far_words, ranks, **settings)


@pytest.mark.xfail(reason="comm/collectives.py, _reduce: gloo is given gradients of a device")
def test_two_groups(run: Run) -> None:
    words = ("--model", "mlp", "--measure", "no", "--set-device", "--more", '{"data_parallel": 2}')
    run(TRAIN, "--farspan", *words, ranks=2)

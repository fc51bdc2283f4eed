"""A model on an emulated device computes what it computes on the CPU."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from tests.emulated.conftest import Run

TRAIN = Path(__file__).parent / "programs" / "train.py"


def saved(path: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    found = torch.load(path)
    return found["losses"], found["state"]


def assert_same(one: Path, other: Path, places: int | None = None) -> None:
    """Raise unless two programs ended alike, to the last bit or to so many decimal places."""
    (losses, state), (other_losses, other_state) = saved(one), saved(other)
    assert state.keys() == other_state.keys()
    if places is not None:
        near = functools.partial(torch.testing.assert_close, atol=10.0**-places, rtol=0.0)
        near(torch.tensor(losses), torch.tensor(other_losses))
        near(dict(state), dict(other_state))
        return
    assert losses == other_losses
    assert [name for name in state if not torch.equal(state[name], other_state[name])] == []


@pytest.mark.parametrize("words", ["--model mlp", "--model gpt --clip", "--model gpt --optimizer sgd --pinned"])
def test_trains_as_the_cpu(run: Run, tmp_path: Path, words: str) -> None:
    common = (TRAIN, *words.split(), "--foreach", "no")
    run(*common, "--device", "cpu", "--save", tmp_path / "cpu.pt")
    ended = run(*common, "--device", "cuda:0", "--save", tmp_path / "device.pt")
    assert_same(tmp_path / "cpu.pt", tmp_path / "device.pt")
    assert ended.races == []

"""Checkpoints from and to other files: the same tensors to the bit, and nothing in a file is ever run."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import farspan
from farspan.errors import CheckpointError
from farspan.state.conversion.differences import differences
from farspan.state.conversion.into_checkpoint import write_checkpoint
from farspan.state.conversion.into_files import write_safetensors, write_torch
from farspan.state.conversion.of_checkpoint import CheckpointSource
from farspan.state.conversion.opened import open_source
from farspan.state.format import Damage, verify


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 30).to(torch.bfloat16))
    return {**model.state_dict(), "empty": torch.zeros(0, 4), "flags": torch.tensor([True, False])}


def checkpoint(folder: Path, num_files: int = 3) -> str:
    torch.save(state() | {"tied": (found := state())["0.weight"], "0.weight": found["0.weight"]}, folder / "model.pt")
    with open_source(str(folder / "model.pt")) as source:
        return write_checkpoint(source, str(folder / "checkpoints"), num_files)


def saved_by_torch(path: Path) -> str:
    torch.save(state(), path / "a.pt")
    return str(path / "a.pt")


def saved_by_safetensors(path: Path) -> str:
    save_file(state(), path / "a.safetensors")
    return str(path / "a.safetensors")


def saved_by_dcp(path: Path) -> str:
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": state()}, checkpoint_id=path / "dcp", no_dist=True)
    return str(path / "dcp")


@pytest.mark.parametrize("save", [saved_by_torch, saved_by_safetensors, saved_by_dcp])
def test_what_is_imported_is_the_same_to_the_bit(save: Callable[[Path], str], tmp_path: Path) -> None:
    path = save(tmp_path)
    key = "model" if save is saved_by_dcp else ""
    with open_source(path, key=key) as source:
        made = write_checkpoint(source, str(tmp_path / "checkpoints"), 4, step=7)
        assert os.path.basename(made) == "step-7" and verify(made) == []
        with CheckpointSource(made) as found:
            assert found.tensors.keys() == state().keys()
            assert list(differences(source, found)) == []


def test_an_export_to_torch_is_what_torch_would_have_saved_other_names_included(tmp_path: Path) -> None:
    with open_source(checkpoint(tmp_path)) as source:
        assert write_torch(source, str(tmp_path / "out.pt")) == [str(tmp_path / "out.pt")]
    found, wanted = torch.load(tmp_path / "out.pt", mmap=True), torch.load(tmp_path / "model.pt")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(item, wanted[name]) and item.dtype == wanted[name].dtype for name, item in found.items())
    assert found["tied"].data_ptr() == found["0.weight"].data_ptr()


def test_an_export_to_safetensors_is_one_file_or_several_with_an_index(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    with open_source(path) as source:
        write_safetensors(source, str(tmp_path / "one.safetensors"), 1.0)
        files = write_safetensors(source, str(tmp_path / "several"), 3000.0)
    assert [os.path.basename(file) for file in files][-1] == "model.safetensors.index.json"
    wanted = state()
    found = load_file(tmp_path / "one.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(item, wanted[name]) for name, item in found.items())
    with open_source(str(tmp_path / "several")) as several, open_source(path) as source:
        assert len(files) > 3 and list(differences(several, source)) == []


def test_what_is_there_already_stays_as_it_is_and_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    (tmp_path / "there").write_text("mine")
    with open_source(path) as source, pytest.raises(CheckpointError, match="is there already"):
        write_safetensors(source, str(tmp_path / "there"), 1e9)
    file = Path(path) / "rank-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    before = sorted(os.listdir(tmp_path))
    for write in (write_torch, lambda source, out: write_safetensors(source, out, 1e9)):
        with open_source(path) as source, pytest.raises(CheckpointError, match="damaged"):
            write(source, str(tmp_path / "out"))
    with CheckpointSource(path, is_whole=True) as source, pytest.raises(CheckpointError, match="damaged"):
        write_checkpoint(source, str(tmp_path / "again"), 1)
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "again"]) and os.listdir(tmp_path / "again") == []


def test_files_that_several_hosts_have_written_are_found_where_they_lie(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    os.rename(f"{path}/rank-00001.safetensors", other / "rank-00001.safetensors")
    assert [type(found) for found in verify(path)] == [Damage]
    assert verify(path, [str(other)]) == []
    with CheckpointSource(path, [str(other)], is_whole=True) as source:
        made = write_checkpoint(source, str(tmp_path / "gathered"), 2)
    assert verify(made) == [] and len(os.listdir(made)) == 3
    with CheckpointSource(path, [str(other)]) as one, CheckpointSource(made) as two:
        assert list(differences(one, two)) == [] and one.aliases == two.aliases == {"tied": "0.weight"}


def test_differences_say_which_tensor_and_by_how_much(tmp_path: Path) -> None:
    changed = state()
    changed["0.bias"][3] += 0.5
    changed["1.weight"][0] = float("nan")
    changed["2.bias"] = changed["2.bias"].float()
    del changed["flags"]
    save_file(changed, tmp_path / "changed.safetensors")
    with open_source(saved_by_torch(tmp_path)) as one, open_source(str(tmp_path / "changed.safetensors")) as other:
        found = {each.name: each for each in differences(one, other)}
    assert found.keys() == {"0.bias", "1.weight", "2.bias", "flags"}
    assert found["0.bias"].num_elements == 1 and found["0.bias"].largest == pytest.approx(0.5)
    assert found["1.weight"].largest == float("inf")
    assert found["2.bias"].what == "bfloat16[30] and float32[30]"
    assert found["flags"].what.startswith("only in")


class _Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, ("attacked",)


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(2), "b": _Attack()}, "bad.pt")
    with pytest.raises(CheckpointError, match="without running what is in it"):
        open_source("bad.pt")
    saved_by_dcp(tmp_path)
    for attack in (
        pickle.dumps(_Attack()),
        b"cos\nsystem\n(S'mkdir attacked'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b".",
    ):
        (tmp_path / "dcp" / ".metadata").write_bytes(attack)
        with pytest.raises(CheckpointError, match="no metadata of a DCP folder"):
            open_source("dcp")
    assert not os.path.exists("attacked")


def test_a_chunk_that_is_missing_or_elsewhere_is_named(tmp_path: Path) -> None:
    path = saved_by_dcp(tmp_path)
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-3000])
    with open_source(path, key="model") as source, pytest.raises(CheckpointError, match="is damaged"):
        write_safetensors(source, str(tmp_path / "out.safetensors"), 1e9)
    with pytest.raises(CheckpointError, match="names begin with"):
        open_source(path, key="net")


def test_farspan_load_takes_what_was_imported_and_exports_what_it_has_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    with open_source(str(tmp_path / "a.pt")) as source:
        made = write_checkpoint(source, str(tmp_path / "made"), 2)
    other = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40))
    assert farspan.load(made, model=other).step == 0
    saved = farspan.save(tmp_path / "saved", model=other, step=3, wait=True).path
    with open_source(saved) as one, open_source(str(tmp_path / "a.pt")) as two:
        assert list(differences(one, two)) == []

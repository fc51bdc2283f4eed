"""`farspan ckpt` as a user types it: what it prints, its exit codes, JSON for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan.cli.main import main


@pytest.fixture
def ckpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.save({"net": {"w": torch.randn(30, 4), "b": torch.zeros(4)}, "epoch": 3}, "saved.pt")

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["ckpt", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_a_file_goes_through_a_checkpoint_and_comes_out_the_same(ckpt: Any) -> None:
    assert ckpt("import", "saved.pt", "all")[2].splitlines()[-1] == "  try  --key net"
    assert ckpt("import", "saved.pt", "all", "--key", "net", "--ranks", "2")[0] == 0
    assert "step-0" in ckpt("ls", "all")[1] and "latest" in ckpt("ls", "all")[1]
    assert ckpt("verify", "all")[:2] == (0, "all/step-0: whole\n")
    assert ckpt("export", "all", "model")[0] == 0
    assert ckpt("export", "all", "model.pt")[0] == 0
    assert ckpt("reshard", "all", "other", "--ranks", "1")[0] == 0
    for one, other in (("model", "model.pt"), ("all", "other"), ("model", "all")):
        assert ckpt("diff", one, other)[:2] == (0, "0 of 2 tensors differ\n")
    assert ckpt("diff", "all", "saved.pt", "--key", "net")[0] == 0


def test_damage_is_named_and_is_an_exit_code(ckpt: Any) -> None:
    ckpt("import", "saved.pt", "all", "--key", "net")
    file = Path("all/step-0/rank-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    code, said, _ = ckpt("verify", "all/step-0", "--json")
    (damage,) = json.loads(said)
    assert code == 1 and damage["tensor"] in ("model/w", "model/b")
    code, said, error = ckpt("export", "all", "model")
    assert code == 2 and said == "" and "is damaged" in error and not Path("model").exists()


def test_differences_and_lists_are_json_for_scripts(ckpt: Any) -> None:
    ckpt("import", "saved.pt", "all", "--key", "net")
    state = torch.load("saved.pt")["net"]
    state["w"][0, 0] += 1
    torch.save(state, "changed.pt")
    code, said, _ = ckpt("diff", "all", "changed.pt", "--json")
    (row,) = json.loads(said)
    assert code == 1 and row["name"] == "w" and row["num_elements"] == 1
    assert [row["name"] for row in json.loads(ckpt("ls", "all/step-0", "--json")[1])] == ["model/w", "model/b"]
    assert json.loads(ckpt("ls", "all", "--json")[1])[0]["is_latest"] is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls", "nothing"], "nothing is not there"),
        (["verify", "."], "is no checkpoint"),
        (["export", "saved.pt", "out", "--max-shard-size", "much"], "is no size"),
        (["reshard", "saved.pt", "out", "--ranks", "2"], "farspan ckpt import"),
        (["reshard", "saved.pt", "out", "--ranks", "0"], "whole number"),
        ([], "COMMAND"),
    ],
)
def test_bad_use_says_what_to_do(ckpt: Any, words: list[str], said: str) -> None:
    code, _, error = ckpt(*words)
    assert code == 2 and said in error

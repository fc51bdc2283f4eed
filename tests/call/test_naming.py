"""Whose line is shown: the user's, not torch's or farspan's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tests.support.launcher import TIMEOUT_S

from farspan.call import naming
from farspan.call.naming import find_where, name_of

PROGRAM = """
import torch
from pathlib import Path
from farspan.call.naming import find_where

names = {}
file = Path(torch.__file__).with_name("made_up.py")
exec(compile("def call(find): return find(1)", file, "exec"), names)
print(torch.__file__)
print(names["call"](find_where)[0].co_filename)
"""


def test_torch_is_not_the_users_behind_a_symbolic_link(tmp_path: Path) -> None:
    link = tmp_path / "packages"
    link.symlink_to(Path(torch.__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(link), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    torch_file, users_file = done.stdout.splitlines()
    assert torch_file.startswith(str(link))
    assert users_file == "<string>"


def test_a_with_of_ours_is_at_the_users_line() -> None:
    """`load_state_dict` on one rank alone was said to be at a line of Python's contextlib."""
    made: dict[str, Any] = {"find_where": find_where, "found": []}
    body = "import contextlib\n@contextlib.contextmanager\ndef ours():\n    found.append(find_where())\n    yield"
    exec(compile(body, naming.__file__, "exec"), made)
    with made["ours"]():
        pass
    assert made["found"][0][0].co_filename == __file__


def test_functions_are_named_as_programs_write_them() -> None:
    shape: Any = torch.Tensor.shape
    functions = [torch.Tensor.topk, torch.topk, shape.__get__, torch.nn.functional.relu]
    assert [name_of(each) for each in functions] == ["Tensor.topk", "torch.topk", "Tensor.shape", "relu"]

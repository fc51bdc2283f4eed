"""Whose line is shown: the user's, not torch's or farspan's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from tests.support.launcher import TIMEOUT_S

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

"""The programs of benchmarks/loops and benchmarks/programs with their batches cut: the gradients of their first step.

Each is run plainly, and with its line over two ranks and `micro_batches=4`, up to its first optimizer step, without
dropout. Its gradients must be those of the whole batch, or its batches stay whole with a reason.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from benchmarks.programs.programs import PACKAGES, SCRIPTS, missing_packages

__all__ = ["measured", "names"]

ROOT = Path(__file__).resolve().parents[2]
LOOPS = ROOT / "examples" / "loops"
FIRST = Path(__file__).with_name("first_step.py")
_MARK = re.compile(r"^([ \t]*)# farspan: (.*)$", re.MULTILINE)


def names() -> list[str]:
    """Of all programs: "loops/..." and "programs/..."."""
    return [f"loops/{file.stem}" for file in sorted(LOOPS.glob("*.py"))] + [
        f"programs/{file.stem}" for file in sorted(SCRIPTS.glob("*.py")) if not missing_packages(file.stem)
    ]


def measured(name: str, num_lanes: int, timeout_s: float) -> dict[str, Any]:
    """One program: how far its gradients are from those of the plain one, and whether its batches were cut."""
    row: dict[str, Any] = {"name": name, "is_cut": False, "reason": "", "error": "", "difference": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        plain = _run(name, 0, Path(folder, "plain"), timeout_s)
        lanes = _run(name, num_lanes, Path(folder, "lanes"), timeout_s)
        if plain["error"]:
            return {**row, "error": f"plain: {plain['error']}", "is_plain_error": True}
        if lanes["error"]:
            return {**row, "error": lanes["error"], "is_unforeseen": True}
    expected, found = plain["gradients"], lanes["gradients"]
    row |= {
        "is_cut": lanes["is_cut"],
        "reason": "; ".join(lanes["reasons"]),
        "is_random": lanes["is_random"],
        "precision": lanes["precision"],
    }
    if [item is None for item in expected] != [item is None for item in found]:
        return {**row, "difference": float("inf")}
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a is not None]
    size = max([float(a.norm()) for a, _ in pairs], default=0.0) or 1.0
    return {**row, "difference": max([float((a - b).norm()) / size for a, b in pairs], default=0.0)}


def _run(name: str, num_lanes: int, folder: Path, timeout_s: float) -> dict[str, Any]:
    work = folder / "work"
    work.mkdir(parents=True)
    kind, _, stem = name.partition("/")
    source = ((LOOPS if kind == "loops" else SCRIPTS) / f"{stem}.py").read_text()
    begin = r"\1__import__('sys').modules['__main__'].IS_BEGUN = True"
    source = _MARK.sub(rf"\1import farspan\n\1\2\n{begin}" if num_lanes else begin, source)
    program = folder / f"{stem}.py"
    program.write_text(source)
    launcher = ["-m", "farspan", "run", "-n", "2", "--log-dir", str(folder)] if num_lanes else []
    path = [str(LOOPS), str(ROOT / "src"), str(PACKAGES), os.environ.get("PYTHONPATH", "")]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "LANES_RESULT": str(folder)}
    environment |= {"LANES": str(num_lanes), "LOOPS_RESULT": str(folder), "FARSPAN_FILES": "all"}
    try:
        done = subprocess.run(
            [sys.executable, *launcher, str(FIRST), str(program)],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout_s:g} s"}
    if not (folder / "gradients.pt").exists():
        return {"error": done.stderr.strip().rpartition("\n")[2][:200] or "it has not stepped"}
    return {
        "error": "",
        "gradients": torch.load(folder / "gradients.pt"),
        **json.loads((folder / "said.json").read_text()),
    }

"""Programs on emulated accelerators, each in a process of its own: torch is another one there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.emulated.build import NotBuiltError, built

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_LIMIT_S = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A program that has ended.

    Attributes:
        code: Its exit status.
        out: What it wrote.
        error: What it wrote to standard error.
        reports: What the emulation saw in each of its processes: "counters", "races", "error".
    """

    code: int
    out: str
    error: str
    reports: list[dict[str, Any]] = field(default_factory=list)

    @property
    def races(self) -> list[str]:
        return [race for report in self.reports for race in report["races"]]


Run = Callable[..., Ended]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test to run builds the extension, which takes minutes where a machine is busy."""
    for item in items:
        if item.path.parent == _HERE:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="module")
def accelerator() -> Path:
    """The extension, which is built if it is not there yet."""
    try:
        return built()
    except NotBuiltError as reason:
        pytest.skip(f"no emulated accelerator: {reason}")


@pytest.fixture
def run(accelerator: Path, tmp_path: Path) -> Run:
    """Runs a program, or some lines of Python, on emulated devices: `ranks` by farspan, `processes` by themselves."""
    count = 0

    def run_it(
        *words: object,
        code: str | None = None,
        ranks: int = 1,
        processes: int = 1,
        devices: str = "cuda:2",
        fails: bool = False,
        **settings: object,
    ) -> Ended:
        nonlocal count
        count += 1
        folder = tmp_path / f"run{count}"
        folder.mkdir()
        if code is not None:
            (folder / "script.py").write_text(code)
            words = (folder / "script.py", *words)
        launcher = ["-m", "farspan", "run", "-n", str(ranks), "--log-dir", str(folder / "logs")]
        command = [sys.executable, "-X", "faulthandler", *(launcher if ranks > 1 else ()), *map(str, words)]
        path = os.pathsep.join(map(str, (_HERE / "site", _ROOT / "src", _ROOT)))
        mine = {"PYTHONPATH": path, "EMULATED_DEVICES": devices, "EMULATED_REPORT": str(folder)}
        prefixes = {name: "" if name.startswith("farspan") else "EMULATED_" for name in settings}
        mine |= {f"{prefixes[name]}{name.upper()}": str(value) for name, value in settings.items()}
        started = [
            subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | mine | {"NUMBER": str(number)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(processes)
        ]
        try:
            texts = [process.communicate(timeout=_LIMIT_S) for process in started]
        finally:
            for process in started:
                process.kill()
        out, error = ("".join(text[which] for text in texts) for which in (0, 1))
        code_of_first = next((process.returncode for process in started if process.returncode), 0)
        if not fails:
            assert code_of_first == 0, out + error
        reports = [json.loads(path.read_text()) for path in folder.glob("*.json")]
        return Ended(code=code_of_first, out=out, error=error, reports=reports)

    return run_it

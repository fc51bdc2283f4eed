"""Whatever runs the user's code, on whichever rank: an error shows the user's own line and module, as plainly."""

from __future__ import annotations

import functools
import json
import re
import signal
import traceback
from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import run_processes
from tests.support.warm.commands import farspan_run

from farspan.launch.raised.tracebacks import format_error
from farspan.launch.rank.interrupts import signals_held

FOLDER = Path(__file__).parent
SCRIPTS = {"modules.py": 22, "backwards.py": 12, "loops.py": 23}
OTHER_MESSAGES = {
    "backward twice": "what went through the graph before is named",
    "device": "the device is found wrong in another place",
}
"""Mistakes of which the message is not that of the plain program; the type is."""
_MOST_OWN_LINES = 12
_HERE = re.compile(r"# here: ([\w -]+)(?:, in .* ?\((\w+)\))?$")


def places(script: str) -> dict[str, tuple[int, str]]:
    """Returns the line of each mistake, and the class of the module around it; "" where there is none."""
    found: dict[str, tuple[int, str]] = {}
    for number, line in enumerate((FOLDER / script).read_text().splitlines(), 1):
        match = _HERE.search(line)
        if match:
            found[match[1]] = (number, match[2] or "")
    return found


@functools.cache
def caught(script: str, num_ranks: int) -> tuple[dict[str, dict[str, Any]], ...]:
    """Returns what each rank of a script has caught, by the names of the mistakes."""
    finished = run_processes(num_ranks, FOLDER / script)
    assert [each.code for each in finished] == [0] * num_ranks, [each.stderr[-2000:] for each in finished]
    assert not any("failed while attempting" in each.stderr for each in finished)
    found = [[json.loads(line) for line in each.stdout.splitlines()] for each in finished]
    assert {len(each) for each in found} == {SCRIPTS[script]}
    return tuple({each["name"]: each for each in rank} for rank in found)


def own_lines(text: str) -> list[str]:
    """Returns the lines of a traceback that are about farspan's code, or said by it."""
    lines = text.splitlines()
    own: list[str] = []
    is_own = False
    for line in lines:
        if line.startswith("  File "):
            is_own = "/src/farspan/" in line
        elif not line.startswith("    "):
            is_own = "farspan" in line
        own += [line] if is_own else []
    return own


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_rank_shows_the_users_line_and_module(script: str) -> None:
    lines = places(script)
    for rank, found in enumerate(caught(script, 2)):
        for name, each in found.items():
            line, module = lines[name.partition(",")[0]]
            text = each["text"]
            assert f'{script}", line {line},' in text or f"{script}:{line}," in text, (rank, name, text)
            if module:
                assert re.search(rf"farspan: raised in [\w., ()]+ \({module}\)", text), (rank, name, text)


@pytest.mark.parametrize("mistake", ["function", "backward, of what is overwritten"])
def test_an_error_of_a_backward_names_the_modules_that_it_goes_through(mistake: str) -> None:
    for found in caught("backwards.py", 2):
        text = found[mistake]["text"]
        assert re.search(r"in the backward through ([\w.]+, )*[\w.]*bad, .*begun at", text), text


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_error_is_said_once_and_farspan_says_little(script: str) -> None:
    for rank, found in enumerate(caught(script, 2)):
        for name, each in found.items():
            first = each["message"].splitlines()[0]
            assert each["text"].count(f"{each['type']}: {first}") == 1, (rank, name, each["text"])
            assert len(own_lines(each["text"])) <= _MOST_OWN_LINES, (rank, name, each["text"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_type_and_message_are_those_of_the_plain_program(script: str) -> None:
    (plain,) = caught(script, 1)
    for rank, found in enumerate(caught(script, 2)):
        for name, each in found.items():
            assert each["type"] == plain[name]["type"], (rank, name, each, plain[name])
            if name not in OTHER_MESSAGES:
                assert each["message"] == plain[name]["message"], (rank, name)


def test_an_error_that_ends_the_program_is_shown_once() -> None:
    run = farspan_run(["-n", "2", str(FOLDER / "uncaught.py")])
    line, _ = places("uncaught.py")["head"]
    assert run.returncode == 1
    assert run.stderr.count("Traceback") == 1, run.stderr
    assert f'uncaught.py", line {line}, in forward' in run.stderr, run.stderr
    assert "farspan: raised in head (Head) at" in run.stderr
    assert "failed while attempting" not in run.stderr and "/src/farspan/" not in run.stderr, run.stderr
    assert run.stderr.count("farspan: raised in head (Head) at") == 1, run.stderr
    remote = [line for line in run.stderr.splitlines() if "RuntimeError: mat1 and mat2" in line]
    assert [line.partition("RuntimeError")[0] for line in remote] == ["RemoteError: rank 1 failed: ", ""], run.stderr
    assert "full traceback" not in run.stderr, run.stderr  # which is below, whole


@pytest.mark.parametrize("mistake", ["loop", "item", "gradient", "file"])
def test_an_error_that_all_ranks_find_is_shown_once(mistake: str) -> None:
    """What the system or torch says of a call that farspan makes in the program's place has no frames of farspan's."""
    run = farspan_run(["-n", "2", str(FOLDER / "uncaught.py"), mistake])
    line, _ = places("uncaught.py")[mistake]
    assert run.returncode == 1
    assert run.stderr.count("Traceback") == 1, run.stderr
    assert f'uncaught.py", line {line}, in <module>' in run.stderr, run.stderr
    assert "/src/farspan/" not in run.stderr, run.stderr


def test_a_name_that_a_tensor_does_not_have_is_said_as_torch_says_it() -> None:
    run = farspan_run(["-n", "2", str(FOLDER / "uncaught.py"), "name"])
    assert "\nAttributeError: 'Tensor' object has no attribute 'squeze'. Did you mean: 'squeeze'?\n" in run.stderr, (
        run.stderr
    )


def test_an_interrupt_has_no_frames_of_farspans_wherever_it_comes() -> None:
    with pytest.raises(KeyboardInterrupt) as caught_here, signals_held():
        signal.raise_signal(signal.SIGINT)
    assert "/src/farspan/" in "".join(traceback.format_exception(caught_here.value))
    assert "/src/farspan/" not in format_error(caught_here.value)


def test_a_variable_keeps_farspans_frames() -> None:
    run = farspan_run(["-n", "2", str(FOLDER / "uncaught.py")], environment={"FARSPAN_TRACEBACK": "full"})
    assert "/src/farspan/record/intercept.py" in run.stderr
    assert "farspan: raised in head (Head) at" in run.stderr

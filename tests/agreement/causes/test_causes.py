"""Where the ranks' programs differ, the hint is about the cause, and the lines of the loop are shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.ranks import run_processes

PROGRAM = Path(__file__).with_name("differing.py")


def line_of(mark: str) -> str:
    lines = PROGRAM.read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# here: {mark}")]
    return f"{PROGRAM}:{number}"


LOOP = "try  does a rank leave the loop sooner"
ONE_RANK, SEEDS = "is it under `if farspan.rank() == 0`", "seed `random`, numpy and torch"
CAUSES = {
    "evaluation": [f"rank 0 called the model at {line_of('evaluation')}, rank 1 at {line_of('training')}.", ONE_RANK],
    "loader": [f"rank 0 called the model at {line_of('loader')}, rank 1 at {line_of('training')}.", ONE_RANK],
    "passes": [f"draws random numbers at {line_of('passes')}", "a DataLoader draws so where a pass over it begins"],
    "branch": [f"rank 0 called the model at {line_of('branch')}, rank 1 at {line_of('training')}.", ONE_RANK],
    "end": [f"rank 0 called the model at {line_of('end')}.", "is that line under `if farspan.rank() == 0`"],
    "often": [f"called the model at {line_of('training')} more often than the others", "as many batches on every rank"],
    "save": [
        f"rank 0: farspan.save, at {line_of('save')}",
        f"rank 1: body at {PROGRAM}:",
        "every rank calls farspan.save;",
    ],
    "early": [
        f"rank 0: farspan.save, at {line_of('early')}",
        f"rank 1: body.bias.grad = None, at {line_of('clear')}",
        "every rank calls farspan.save;",
    ],
    "clear": [
        f"rank 0: body.bias.grad = None, at {line_of('clear')}",
        f"rank 1: body at {PROGRAM}:",
        "every rank calls optimizer.zero_grad();",
    ],
    "restore": [
        f"rank 0: farspan.load, at {line_of('restore')}",
        f"rank 1: body at {PROGRAM}:",
        "every rank calls farspan.load;",
    ],
    "break": [
        f"rank 1 has come past its program's last line,\n       after optimizer.step(), at {line_of('step')}",
        LOOP,
    ],
    "unstepped": ["rank 1: end of the step: the program is over", LOOP],
    "saved": [f"waits in step 3 at farspan.save, at {line_of('saved')}", "every rank calls farspan.save;"],
    "copied": [f"at copy.deepcopy of a model, at {line_of('copied')}", "every rank calls copy.deepcopy;"],
    "exit": [f"rank 1 has called sys.exit(0) at {line_of('exit')}, in <module>,\n       after optimizer.step()", LOOP],
    "load": [
        "rank 0: load_state_dict, at ",
        "rank 1: torch.randn draws random numbers at",
        "is one of these lines under",
    ],
    "data": ["with the checksum", SEEDS, "with the same seed on every rank"],
    "order": ["the ranks do the same in another order", "sort what the program goes through"],
}


@pytest.mark.parametrize("story", CAUSES)
def test_the_hint_follows_the_cause(story: str, tmp_path: Path) -> None:
    finished = run_processes(2, PROGRAM, [story, str(tmp_path / "checkpoints")])
    found = next(each.stderr for each in finished if "DivergenceError: " in each.stderr)
    assert any(each.code for each in finished)
    for words in CAUSES[story]:
        assert words in found, found
    assert (SEEDS in found) == (story == "data"), found

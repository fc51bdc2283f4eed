"""The environment variables of farspan: one place that names them, reads them, and knows what each means.

    FARSPAN_DEADLINE     seconds that a rank waits for another one before it gives up (300)
    FARSPAN_FILES        whose files are the script's: "first" (rank 0's) or "all"
    FARSPAN_MEASURE      whether the first step is measured to choose the plan (yes)
    FARSPAN_OUTPUT       whose output is on the console under torchrun, srun, mpirun: "first" (rank 0's) or "all"
    FARSPAN_RECORD       whether a single process records too what several would, though nothing is to be won by it (no)
    FARSPAN_REPORT       file of the report on a training step (none)
    FARSPAN_SAME_HOST    whether ranks of one host read each other's memory (yes); else all goes over gloo
    FARSPAN_SANITIZE     whether all that farspan relies on is checked, slowly; a number is the seed of its delays (no)
    FARSPAN_SECRET       what all ranks of a run know and nobody else (new for each run)
    FARSPAN_STRAGGLER    seconds for which a rank must be slower than the others before the plan is searched again (30)
    FARSPAN_TRACEBACK    whose frames tracebacks show: "short" (the program's and torch's) or "full" (farspan's too)
    FARSPAN_VERBOSE      whether farspan says more on standard error (no)

Yes and no are written as 1, true, yes, on and 0, false, no, off, in any case. `farspan run` sets other variables of
this kind for the processes that it starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from farspan.errors import LaunchError, quoted
from farspan.units import parse_number

__all__ = ["OUTPUTS", "PREFIX", "TRACEBACKS", "check", "choice", "flag", "seconds", "seed", "text", "unknown_names"]

PREFIX = "FARSPAN_"
_SETTINGS = (
    "DEADLINE",
    "FILES",
    "MEASURE",
    "OUTPUT",
    "RECORD",
    "REPORT",
    "SAME_HOST",
    "SANITIZE",
    "SECRET",
    "STRAGGLER",
    "TRACEBACK",
    "VERBOSE",
)
_OF_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "STORE", "LAUNCHER", "LOG_DIR", "RUN_FOLDER")
_OF_RUN = ("EACH_SAVE", "ENTROPY", "GATE", "KEEPERS", "KEEP_GOING", "MEMORY", "PROGRESS", "RESTART", "SAVED")
_OF_ROLES = ("HOSTS", "ROLE", "SERVICES")
_KNOWN = tuple(PREFIX + name for name in (*_SETTINGS, *_OF_LAUNCHER, *_OF_RUN, *_OF_ROLES))
TRACEBACKS = {"short": "the program's frames and torch's", "full": "farspan's own too"}
OUTPUTS = {"first": "rank 0's, and files for the others", "all": "each rank's"}
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
LONGEST_DEADLINE_S = 1e9
GREATEST_SEED = 10**18 - 1


def text(name: str, given: Mapping[str, str] | None = None) -> str:
    """Returns the text of a setting, "" where it is not set.

    Args:
        name: Its name after FARSPAN_.
        given: Variables; None takes those of this process.
    """
    return (os.environ if given is None else given).get(PREFIX + name, "").strip()


def flag(name: str, *, default: bool) -> bool:
    """Returns a setting that says yes or no.

    Raises:
        LaunchError: It says something else.
    """
    found = text(name).lower()
    if found and found not in _YES + _NO:
        raise LaunchError(
            f"{PREFIX}{name}={quoted(found)} is neither yes nor no.",
            why=f"yes is {', '.join(_YES)}; no is {', '.join(_NO)}.",
            hint=f"{PREFIX}{name}={'0' if default else '1'}, or unset it: {'yes' if default else 'no'} is the default",
        )
    return found in _YES if found else default


def seconds(name: str, *, default: float) -> float:
    """Returns a setting that is a duration in seconds, above 0.

    Raises:
        LaunchError: It is none.
    """
    found = text(name)
    value = parse_number(found) if found else default
    if value is None or not 0.0 < value <= LONGEST_DEADLINE_S:
        raise LaunchError(
            f"{PREFIX}{name}={quoted(found)} is not a number of seconds.",
            why=f"it is above 0 and at most {LONGEST_DEADLINE_S:g}.",
            hint=f"{PREFIX}{name}={default:g}",
        )
    return value


def seed(name: str, given: Mapping[str, str] | None = None) -> int | None:
    """Returns a setting that says no, yes (1), or a number that yes is drawn from; None for no.

    Args:
        name: Its name after FARSPAN_.
        given: Variables; None takes those of this process.

    Raises:
        LaunchError: It says something else.
    """
    found = text(name, given).lower()
    if not found or found in _NO:
        return None
    if found in _YES:
        return 1
    if not (found.isascii() and found.isdecimal() and len(found) <= len(str(GREATEST_SEED))):
        raise LaunchError(
            f"{PREFIX}{name}={quoted(found)} is neither yes nor no, and no seed.",
            why=f"a seed is a whole number from 1 to {GREATEST_SEED}; yes is {', '.join(_YES)}.",
            hint=f"{PREFIX}{name}=1, or unset it",
        )
    return int(found)


def choice(name: str, choices: Mapping[str, str], *, default: str, given: Mapping[str, str] | None = None) -> str:
    """Returns a setting that is one of several words.

    Args:
        name: Its name after FARSPAN_.
        choices: The words, and what each means.
        default: The word where it is not set.
        given: Variables; None takes those of this process.

    Raises:
        LaunchError: It is another word.
    """
    found = text(name, given) or default
    if found not in choices:
        raise LaunchError(
            f"{PREFIX}{name}={quoted(found)} is no choice.",
            why="; ".join(f"{word!r}: {meaning}" for word, meaning in choices.items()) + ".",
            hint=f"{PREFIX}{name}={default}",
        )
    return found


def check() -> None:
    """Refuses settings that a rank would refuse, before any rank is started.

    Raises:
        LaunchError: One is not of its kind.
    """
    flag("MEASURE", default=True)
    flag("RECORD", default=False)
    flag("SAME_HOST", default=True)
    flag("VERBOSE", default=False)
    choice("OUTPUT", OUTPUTS, default="first")
    choice("TRACEBACK", TRACEBACKS, default="short")
    seconds("DEADLINE", default=300.0)
    seed("SANITIZE")
    seconds("STRAGGLER", default=30.0)


def unknown_names(names: Iterable[str]) -> list[str]:
    """Returns a line for each variable that looks like one of farspan's and is none."""
    import difflib  # on the way of every start: only where it is of use

    lines: list[str] = []
    for name in sorted(names):
        if name.startswith(PREFIX) and name not in _KNOWN:
            near = difflib.get_close_matches(name[:100], _KNOWN, n=1, cutoff=0.0)[0]
            lines.append(f"farspan: the variable {name[:100]} means nothing; the nearest that does is {near}")
    return lines

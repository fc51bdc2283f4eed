"""The cause of a failure is found in a log."""

from __future__ import annotations

import pytest

from farspan.launch.logs import find_cause, find_exception, find_word_of, only_heard_of_it


def cause(log: str) -> str:
    return find_cause(log, killed=False)


_CAUSE = "Traceback (most recent call last):\n  x\nKeyError: 1\n"
_OTHER = "Traceback (most recent call last):\n  y\nA: 2\n"
_IGNORED = f"Exception ignored in atexit callback: <function f>\n{_OTHER}"


def test_traceback_is_found_among_other_output():
    traceback = "Traceback (most recent call last):\n  File 'a', line 1\n    f()\nValueError: a\n  why  b"
    assert cause(f"hello\n{traceback}\n") == traceback
    assert cause(f"Traceback (most recent call last):\n  x\nKeyError: 1\nagain\n{traceback}") == traceback
    assert cause(f" 50%|### | 5/10{traceback}") == traceback
    prefixed = "".join(f"[rank3]: {line}\n" for line in traceback.splitlines()) + "[rank3]: "
    assert cause(prefixed) == traceback


def test_a_line_of_megabytes_is_read_in_linear_time():
    bar = "".join(f"{i:7d}/100000 [###]" for i in range(250_000))  # square time would be longer than a test may take
    traceback = "Traceback (most recent call last):\n  x\nKeyError: 1"
    assert cause(f"{bar}{traceback}") == traceback


def test_exception_group_is_shown_whole():
    group = (
        "  + Exception Group Traceback (most recent call last):\n  |   File 'a', line 1\n"
        "  | ExceptionGroup: two (2 sub-exceptions)\n  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n    |   File 'a', line 1\n    | ValueError: a\n"
        "    +------------------------------------"
    )
    assert cause("hello\n" + group) == group


def test_without_a_traceback_the_last_lines_are_shown():
    assert cause("\n".join(map(str, range(100)))).splitlines() == [str(i) for i in range(80, 100)]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", False),
        ("RemoteError: rank 1 failed.\n", True),
        ("Traceback (most recent call last):\n  x\nfarspan.errors.RemoteError: rank 1\n  why  x\n", True),
        (
            "[rank2]: Traceback (most recent call last):\n[rank2]:   x\n[rank2]: RemoteError: a\n[rank2]: ",
            True,
        ),
        ("RemoteError: old\nTraceback (most recent call last):\n  x\nValueError: a\n", False),
        ("Traceback (most recent call last):\n  x\nMyRemoteError: a\n", False),
    ],
)
def test_who_only_heard_of_a_failure_is_told_by_the_last_exception(log, expected):
    assert only_heard_of_it(log) is expected


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("step 1\nstep 2\n", ""),
        (
            "Traceback (most recent call last):\n  x\nKeyError: 1\nTraceback (most recent call last):\n  x\nA: 2\n",
            "A: 2",
        ),
        (
            "Traceback (most recent call last):\n  x\nfarspan.errors.DeadlineError: rank 0\n  why  x\n",
            "DeadlineError: rank 0",
        ),
        ("step 1\nDivergenceError: the ranks differ\n  why  x\n", "DivergenceError: the ranks differ"),
        ("50%" * 900 + "Traceback (most recent call last):\n  x\nValueError: bad sample\n", "ValueError: bad sample"),
        ("  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: two\n", ""),
        (
            f"{_CAUSE}{_IGNORED}\nDuring handling of the above exception, another exception occurred:\n\n{_OTHER}",
            "KeyError: 1",
        ),
    ],
)
def test_the_last_exception_is_named_in_a_line(log, expected):
    assert find_exception(log) == expected


def test_what_others_heard_of_a_rank_is_found():
    log = "step 1\nRemoteError: rank 2 failed: OSError: [Errno 28] No space left on device\n  why  x\n"
    assert find_word_of(2, log) == "OSError: [Errno 28] No space left on device"
    assert find_word_of(1, log) == ""


def test_what_goes_wrong_at_the_end_of_python_is_not_the_cause():
    assert find_cause(_CAUSE + _IGNORED, killed=False) == f"{_CAUSE}..."

"""The environment variables of farspan."""

from __future__ import annotations

import pytest

from farspan import settings
from farspan.errors import LaunchError


@pytest.mark.parametrize("said", ["0", "false", "No", " OFF "])
def test_every_way_to_say_no_is_one(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("FARSPAN_MEASURE", said)
    assert settings.flag("MEASURE", default=True) is False


@pytest.mark.parametrize("said", ["1", "true", "Yes", "on"])
def test_every_way_to_say_yes_is_one(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("FARSPAN_VERBOSE", said)
    assert settings.flag("VERBOSE", default=False) is True


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSPAN_MEASURE", " ")
    monkeypatch.setenv("FARSPAN_DEADLINE", "")
    assert settings.flag("MEASURE", default=True) is True
    assert settings.seconds("DEADLINE", default=7.0) == 7.0


def test_what_is_neither_yes_nor_no_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSPAN_SAME_HOST", "perhaps")
    with pytest.raises(LaunchError, match="FARSPAN_SAME_HOST='perhaps' is neither yes nor no"):
        settings.flag("SAME_HOST", default=True)


@pytest.mark.parametrize("said", ["soon", "0", "-1", "nan", "inf", "1e400", "10 s", "1_0", "\u0661", "9" * 50, "1e10"])
def test_a_deadline_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("FARSPAN_DEADLINE", said)
    with pytest.raises(LaunchError, match="is not a number of seconds"):
        settings.seconds("DEADLINE", default=300.0)
    with pytest.raises(LaunchError, match="is not a number of seconds"):
        settings.check()


def test_a_word_that_is_no_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSPAN_FILES", "both")
    with pytest.raises(LaunchError, match="'first': rank 0's; 'all': everybody's"):
        settings.choice("FILES", {"first": "rank 0's", "all": "everybody's"}, default="first")


def test_unknown_variables_are_named_with_the_nearest() -> None:
    lines = settings.unknown_names(["FARSPAN_DEADLIN", "FARSPAN_DEADLINE", "FARSPAN_RANK", "PATH"])
    assert lines == ["farspan: the variable FARSPAN_DEADLIN means nothing; the nearest that does is FARSPAN_DEADLINE"]


@pytest.mark.parametrize("name", ["MEASURE", "RECORD", "SAME_HOST", "VERBOSE"])
def test_all_flags_are_checked_before_ranks_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.check()
    monkeypatch.setenv(f"FARSPAN_{name}", "maybe")
    with pytest.raises(LaunchError, match=f"FARSPAN_{name}='maybe' is neither yes nor no"):
        settings.check()
    for text in (" Yes ", "off", "", "  "):
        monkeypatch.setenv(f"FARSPAN_{name}", text)
        settings.check()


def test_tracebacks_are_short_or_full(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("full", "short", ""):
        monkeypatch.setenv("FARSPAN_TRACEBACK", text)
        settings.check()
    monkeypatch.setenv("FARSPAN_TRACEBACK", "none")
    with pytest.raises(LaunchError, match="'short': the program's frames and torch's"):
        settings.check()


def test_a_long_variable_is_quoted_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSPAN_VERBOSE", "y" * 100_000)
    with pytest.raises(LaunchError) as caught:
        settings.flag("VERBOSE", default=False)
    assert len(str(caught.value)) < 300
    assert max(map(len, settings.unknown_names(["FARSPAN_" + "X" * 100_000]))) < 300

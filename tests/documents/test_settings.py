"""The variables of farspan: each is of its kind, or an error says what it is to be."""

from __future__ import annotations

import pytest

from farspan import settings
from farspan.errors import LaunchError


@pytest.mark.parametrize(
    "text", ["1e10", "nan", "inf", "1e999", "-1", "0", "five", "1_0", "\u0661", "9" * 50, "1,5", "0x10"]
)
def test_seconds_are_a_number_above_0(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSPAN_DEADLINE", text)
    for call in (lambda: settings.seconds("DEADLINE", default=300.0), settings.check):
        with pytest.raises(LaunchError, match="not a number of seconds") as caught:
            call()
        assert caught.value.why and caught.value.hint == "FARSPAN_DEADLINE=300"


@pytest.mark.parametrize("name", ["MEASURE", "SAME_HOST", "VERBOSE"])
def test_all_flags_are_checked_before_ranks_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.check()
    monkeypatch.setenv(f"FARSPAN_{name}", "maybe")
    with pytest.raises(LaunchError, match=f"FARSPAN_{name}='maybe' is neither yes nor no"):
        settings.check()
    for text in (" Yes ", "off", "", "  "):
        monkeypatch.setenv(f"FARSPAN_{name}", text)
        settings.check()


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSPAN_DEADLINE", " ")
    assert settings.seconds("DEADLINE", default=3.0) == 3.0
    monkeypatch.setenv("FARSPAN_DEADLINE", " 2.5 ")
    assert settings.seconds("DEADLINE", default=3.0) == 2.5


def test_a_long_variable_is_quoted_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSPAN_VERBOSE", "y" * 100_000)
    with pytest.raises(LaunchError) as caught:
        settings.flag("VERBOSE", default=False)
    assert len(str(caught.value)) < 300
    assert max(map(len, settings.unknown_names(["FARSPAN_" + "X" * 100_000]))) < 300

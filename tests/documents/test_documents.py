"""Bounds on what is read: files that are none, texts without end, numbers that are no numbers; and no traceback."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.documents.edits import edited, try_to_read

from farspan import documents
from farspan.documents import MAX_DEPTH, MAX_DIGITS, parse_json, parse_toml, read_text
from farspan.errors import PlanError


def said_of(call: Callable[[], Any]) -> str:
    """The error of a call, which has all three parts and is short."""
    with pytest.raises(PlanError) as caught:
        call()
    assert caught.value.what and caught.value.why and caught.value.hint
    assert len(str(caught.value)) < 2000 and len(str(caught.value).splitlines()) <= 8
    return str(caught.value)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        assert "no regular file" in said_of(lambda path=path: read_text(path, hint="another"))
    for path in (tmp_path / "none", tmp_path / "loop", tmp_path / ("x" * 300), "", "a\0b"):
        assert "cannot be read" in said_of(lambda path=path: read_text(path, hint="another"))


def test_only_text_of_some_length_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xff\xfe1")
    assert "not UTF-8" in said_of(lambda: read_text(path, hint="another"))
    path.write_bytes(b"\xef\xbb\xbf[1]")
    assert read_text(path, hint="another") == "[1]"  # with a byte order mark, as editors leave it
    monkeypatch.setattr(documents, "MAX_BYTES", 2)
    path.write_text("12")
    assert read_text(path, hint="another") == "12"
    path.write_text("123")
    assert "larger than" in said_of(lambda: read_text(path, hint="another"))


@pytest.mark.parametrize("parse", [parse_json, parse_toml])
def test_a_text_that_is_too_long_is_not_parsed(parse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_BYTES", 10)
    monkeypatch.setattr(documents, "MAX_TOML_BYTES", 10)
    assert "too large" in said_of(lambda: parse("a" * 11, "file"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested too deeply"),
        ("[" * 1_000_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("1" * (MAX_DIGITS + 1), "at most 40 digits"),
        ("-0." + "1" * 100_000, "at most 40 digits"),
        ("[1e999]", "'1e999' is no number"),
        ("[-Infinity, 1]", "'-Infinity' is no number"),
        ('{"a": NaN}', "'NaN' is no number"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', 'the key "c" is there twice'),
        ('{"a": 1, "a": 1}', 'the key "a" is there twice'),
        ('["\\ud800"]', "half a character"),
        ('["a\x01"]', "line 1, column 4"),
        ("[1] [2]", "line 1, column 5"),
        ("", "line 1, column 1"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_json_that_is_none_or_has_no_bounds_is_refused(text: str | bytes, message: str) -> None:
    assert message in said_of(lambda: parse_json(text, "file.json"))


def test_json_has_so_many_values_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_VALUES", 4)
    assert parse_json("[1,2,3]", "file") == [1, 2, 3]
    assert parse_json('[",,,,,,,"]', "file") == [",,,,,,,"]  # what stands in texts is no value
    assert "too many values" in said_of(lambda: parse_json("[1,2,3,4,5]", "file"))
    assert "too many values" in said_of(lambda: parse_toml("a=1\n" * 5, "file"))


def test_json_up_to_the_bounds_is_read() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert str(parse_json(deep, "file")) == deep
    assert parse_json("9" * MAX_DIGITS, "file") == 10**MAX_DIGITS - 1
    assert parse_json('"[[[[[\\"' + "[" * 100 + '"', "file") == '[[[[["' + "[" * 100
    assert parse_json('["\\ud83d\\ude00", 1e-9, -0.5e+3]', "file") == ["\U0001f600", 1e-9, -500.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 50_000, "nested too deeply"),
        ("a" + ".a" * 50_000 + " = 1", "nested too deeply"),
        ("a = 0x" + "f" * 5000, "at most 40 digits"),
        ("a = " + "1" * 5000, "at most 40 digits"),
        ("a = nan", "'nan' is no number"),
        ("a = -inf", "'-inf' is no number"),
        ("a = 1e999", "'1e999' is no number"),
        ("a = 1\na = 2", "is not TOML"),
        ("[a]\n[a]", "is not TOML"),
        ('a = "\\ud800"', "is not TOML"),
        ("a = 2026-99-99", "is not TOML"),
        ("a", "is not TOML"),
    ],
)
def test_toml_that_is_none_or_has_no_bounds_is_refused(text: str, message: str) -> None:
    assert message in said_of(lambda: parse_toml(text, "file.toml"))


def test_what_stands_in_strings_and_comments_of_toml_counts_for_nothing() -> None:
    text = "# " + "." * 200 + '\na = "' + "[." * 100 + "\"\nb = '''" + "[\n" * 100 + "'''\n"
    assert parse_toml(text, "file") == {"a": "[." * 100, "b": "[\n" * 100}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**39), 10**39) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
@settings(derandomize=True, max_examples=100)
def test_json_of_any_value_is_read_as_json_reads_it(value: Any) -> None:
    import json

    assert parse_json(json.dumps(value), "file") == value


@given(edited('{"a": [1, 2.5e3, "b\\n"], "c": {"d": null, "e": false}}'))
@settings(derandomize=True, max_examples=300)
def test_no_text_is_more_than_an_error(text: str) -> None:
    for parse in (parse_json, parse_toml):
        try_to_read(lambda text, parse=parse: parse(text, "file"), text)

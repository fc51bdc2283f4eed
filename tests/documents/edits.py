"""Texts that somebody, or a disk, has spoiled: a valid one, edited in a few places."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hypothesis import strategies as st

from farspan.errors import PlanError

__all__ = ["edited", "try_to_read"]

_T = TypeVar("_T")

_PIECES = (
    *('"', "{", "}", "[", "]", ",", ":", "=", "\n", "#", "\\", "\\ud800", "\x00", "\x1b[2J", "\u00e9", "\u0661"),
    *("null", "true", "-1", "0", "1.5", "1e999", "NaN", '""', "[]", "{}", "9" * 60, "9" * 12, "[" * 50, "rank:9"),
)


@st.composite
def edited(draw: st.DrawFn, text: str) -> str:
    """The text, with up to three pieces of it replaced, repeated or taken out."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        text = text[:start] + draw(st.sampled_from((*_PIECES, text[start:end] * 2, ""))) + text[end:]
    return text


def try_to_read(read: Callable[[str], _T], text: str) -> _T | None:
    """What is read, or None where the text is refused with all three parts of an error."""
    try:
        return read(text)
    except PlanError as error:
        parts = (error.what, error.why, error.hint)
    assert all(parts), parts
    return None

"""Which exception all ranks raise for one that a call has raised on its owner."""

from __future__ import annotations

import pytest
import torch

from farspan.call.wire.exceptions import exception_from_json, exception_to_json, sendable


class OwnError(ValueError):
    """Of a class that the code of no call names."""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("a", 1), ValueError, "('a', 1)"),
        (ValueError(torch.Size([2])), ValueError, "torch.Size([2])"),
        (ValueError(object), ValueError, "<class 'object'>"),  # an argument that cannot be sent: its text is
        (KeyError(object), KeyError, repr("<class 'object'>")),
        (OwnError("wrong"), ValueError, "OwnError: wrong"),
        (OwnError(object), ValueError, "OwnError: <class 'object'>"),
        (UnicodeDecodeError("ascii", b"\xff", 0, 1, "no"), UnicodeError, None),
    ],
)
def test_an_exception_that_is_sent_is_of_the_nearest_class_and_has_its_text(
    error: Exception, kind: type[Exception], text: str | None
) -> None:
    found = sendable(error, [])
    assert type(found) is kind
    assert text is None or str(found) == text
    arrived = exception_from_json(exception_to_json(found), [])
    assert type(arrived) is kind and str(arrived) == str(found)


def test_an_exception_that_every_rank_can_make_is_raised_as_it_is() -> None:
    error = ValueError("a", (1, None))
    assert sendable(error, []) is error

from __future__ import annotations

import pytest

from farspan.errors import PlanError
from farspan.plan import Place, format_place, parse_place


@pytest.mark.parametrize(
    ("text", "rank", "device"),
    [("rank:1", 1, None), ("rank:1/cuda:0", 1, "cuda:0"), ("rank:0/cpu", 0, "cpu"), ("rank:12/mps", 12, "mps")],
)
def test_a_place_reads_back_what_it_wrote(text: str, rank: int, device: str | None) -> None:
    place = parse_place(text)
    assert place == Place(rank=rank, device=device)
    assert format_place(place) == str(place) == text


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1", "rank:1"),
        ("cuda:0", "rank:0/cuda:0"),
        ("rank1/cuda:0", "rank:1/cuda:0"),
        ("rank:1/gpu:2", "rank:1/cuda:2"),
        ("rank:1/gpu", "rank:1/cuda"),
        ("rank:1/cuda0", "rank:1/cuda:0"),
        ("rank:-1", "rank:1"),
        ("rank:1/", "rank:1"),
        ("rank:1 ", "rank:1"),
        ("", "rank:0"),
    ],
)
def test_a_bad_place_says_how_to_write_it(text: str, hint: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_place(text)
    assert repr(text) in caught.value.what
    assert f'"{hint}"' in caught.value.hint
    assert caught.value.why
    assert len(str(caught.value).splitlines()) <= 8


def test_a_place_that_is_no_string_is_a_plan_error() -> None:
    with pytest.raises(PlanError, match="-1 is not a place"):
        parse_place(-1)
    with pytest.raises(PlanError, match="True is not a place"):
        parse_place(True)
    assert parse_place(1) == Place(rank=1)

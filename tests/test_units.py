from __future__ import annotations

import pytest

from farspan.units import count_of, format_bytes, format_count, format_seconds


def test_one_thing_has_no_plural() -> None:
    counts = [(1, "micro-batch"), (8, "micro-batch"), (1, "process"), (2, "process"), (3, "copy"), (0, "day")]
    texts = [count_of(count, noun) for count, noun in counts]
    assert texts == ["1 micro-batch", "8 micro-batches", "1 process", "2 processes", "3 copies", "0 days"]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (16 * 2**30, "16.0 GiB"),
        (2**20 - 1, "1.0 MiB"),
        (-2048, "-2.0 KiB"),
        (3 * 2**60, "3072.0 PiB"),
    ],
)
def test_bytes_in_powers_of_1024(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (999.7, "1.0 k"), (1_234_567, "1.2 M"), (999_960, "1.0 M"), (7e9, "7.0 B")],
)
def test_counts_in_powers_of_1000(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.312, "312 ms"),
        (0.99996, "1.00 s"),
        (2.5, "2.50 s"),
        (99.96, "100 s"),
        (4.2e-5, "42.0 us"),
        (61.26, "61.3 s"),
        (0.0099999, "10.0 ms"),
        (3e-9, "3.00 ns"),
        (150, "2.5 min"),
        (9000, "2.5 h"),
        (float("inf"), "inf s"),
    ],
)
def test_seconds_with_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text

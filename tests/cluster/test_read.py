"""cluster.toml: units, defaults, and every mistake named."""

from __future__ import annotations

import math

import pytest

from farspan.cluster import read_cluster
from farspan.cluster.read import parse_cluster
from farspan.errors import PlanError

TEXT = """
[links]
within = "300 GB/s"
between = "25 GB/s"
latency = "5 us"
[[hosts]]
kind = "A100"
count = 4
devices = 8
memory = "80 GiB"
[[hosts]]
name = "old"
kind = "V100"
devices = 4
memory = "16 GiB"
speed = 0.4
between = "10 GB/s"
pays_transfers = false
"""


def test_hosts_take_what_links_say_and_may_say_otherwise() -> None:
    new, old = parse_cluster(TEXT).classes
    assert (new.name, new.num_devices, new.memory_bytes, new.speed) == ("A100", 32, 80 * 2**30, 1.0)
    assert (new.within_bytes_per_s, new.between_bytes_per_s, new.latency_s) == (300e9, 25e9, pytest.approx(5e-6))
    assert (old.name, old.kind, old.num_devices, old.between_bytes_per_s) == ("old", "V100", 4, 10e9)
    assert new.pays_transfers and not old.pays_transfers
    assert new.bandwidth(8) == 300e9 and new.bandwidth(9) == 25e9


def test_what_is_left_out_is_no_limit() -> None:
    (only,) = parse_cluster('[[hosts]]\nkind = "cpu"').classes
    assert only.num_devices == 1 and math.isinf(only.memory_bytes) and math.isinf(only.between_bytes_per_s)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[hosts", "is not TOML"),
        ("", "names no hosts"),
        ("[[hosts]]\ncount = 1", "kind is None"),
        ('[[hosts]]\nkind = "a"\ndevises = 2', 'unknown key "devises"'),
        ('[[hosts]]\nkind = "a"\ndevices = 0', "devices is 0"),
        ('[[hosts]]\nkind = "a"\nmemory = "80 GX"', "memory is '80 GX'"),
        ('[[hosts]]\nkind = "a"\nmemory = -1', "memory is -1"),
        ('[[hosts]]\nkind = "a"\nspeed = 0', "speed is 0"),
        ('[[hosts]]\nkind = "a"\npays_transfers = 1', "pays_transfers is 1"),
        ('[[hosts]]\nkind = "a"\n[[hosts]]\nkind = "a"', 'two tables of hosts are called "a"'),
        ('links = 3\n[[hosts]]\nkind = "a"', "links is 3"),
    ],
)
def test_a_mistake_is_named(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_cluster(text)
    assert message in caught.value.what and caught.value.why and caught.value.hint


def test_a_file_that_is_not_there_is_an_error(tmp_path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        read_cluster(tmp_path / "none.toml")

"""cluster.toml: units, defaults, and every mistake named."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from tests.documents.edits import edited, try_to_read

from farspan.cluster import read_cluster
from farspan.cluster.read import parse_cluster
from farspan.errors import PlanError
from farspan.units import MAX_COUNT

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
"""


def test_hosts_take_what_links_say_and_may_say_otherwise() -> None:
    new, old = parse_cluster(TEXT).classes
    assert (new.name, new.num_devices, new.memory_bytes, new.speed) == ("A100", 32, 80 * 2**30, 1.0)
    assert (new.within_bytes_per_s, new.between_bytes_per_s, new.latency_s) == (300e9, 25e9, pytest.approx(5e-6))
    assert (old.name, old.kind, old.num_devices, old.between_bytes_per_s) == ("old", "V100", 4, 10e9)
    assert new.bandwidth(8) == 300e9 and new.bandwidth(9) == 25e9


def test_what_is_left_out_is_no_limit() -> None:
    (only,) = parse_cluster('[[hosts]]\nkind = "cpu"').classes
    assert only.num_devices == 1 and math.isinf(only.memory_bytes) and math.isinf(only.between_bytes_per_s)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[hosts", "is not TOML"),
        ("", "names no hosts"),
        ("[[hosts]]\ncount = 1", "has no kind"),
        ('[[hosts]]\nkind = "a"\ndevises = 2', 'unknown key "devises"'),
        ('[[hosts]]\nkind = "a"\ndevices = 0', "devices is 0"),
        ('[[hosts]]\nkind = "a"\nmemory = "80 GX"', "memory is '80 GX'"),
        ('[[hosts]]\nkind = "a"\nmemory = -1', "memory is -1"),
        ('[[hosts]]\nkind = "a"\nspeed = 0', "speed is 0"),
        ('[[hosts]]\nkind = "a"\n[[hosts]]\nkind = "a"', 'two tables of hosts are called "a"'),
        ('links = 3\n[[hosts]]\nkind = "a"', "links is 3"),
        ('[links]\nwithin = "fast"\n[[hosts]]\nkind = "a"\nwithin = "1 GB/s"', "links: within is 'fast'"),
        ('[[hosts]]\nkind = " "', "kind is ' '"),
        ('[[hosts]]\nkind = "a"\nname = ""', "name is ''"),
        ('[[hosts]]\nkind = "a"\ndevices = true', "devices is True"),
        ('[[hosts]]\nkind = "a"\ncount = 1000000000', "count is 1000000000"),
        ('[[hosts]]\nkind = "a"\ncount = 60000\ndevices = 60000', "all devices is 3600000000"),
        ('[[hosts]]\nkind = "a"\nspeed = 1e300', "speed is 1e+300"),
        ('[[hosts]]\nkind = "a"\nspeed = inf', "'inf' is no number"),
        ('[[hosts]]\nkind = "a"\nmemory = "80 GiB/s"', "memory is '80 GiB/s'"),
        ('[[hosts]]\nkind = "a"\nmemory = "8\u0660 GiB"', "memory is"),
        ('[[hosts]]\nkind = "a"\nmemory = "80 \u212aiB"', "memory is"),
        ('[[hosts]]\nkind = "a"\nmemory = "1e999 GiB"', "memory is '1e999 GiB'"),
        ('[[hosts]]\nkind = "a"\nlatency = "-5 us"', "latency is '-5 us'"),
        ('[[hosts]]\nkind = "a"\nwithin = 0', "within is 0"),
        ('[[hosts]]\nkind = "a"\nwithin = [1]', "within is [1]"),
        ('[[hosts]]\nkind = "a"\nkind = "b"', "is not TOML"),
        ("".join(f'[[hosts]]\nkind = "a{i}"\n' for i in range(257)), "too many tables of hosts"),
    ],
)
def test_a_mistake_is_named(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_cluster(text)
    assert message in caught.value.what and caught.value.why and caught.value.hint


@given(edited(TEXT))
@settings(derandomize=True, max_examples=200)
def test_no_edit_of_a_file_is_more_than_an_error(text: str) -> None:
    cluster = try_to_read(parse_cluster, text)
    if cluster is not None:
        assert 1 <= cluster.num_devices <= MAX_COUNT and all(each.kind.strip() for each in cluster.classes)
        assert all(each.between_bytes_per_s > 0 and 0 < each.speed < math.inf for each in cluster.classes)


def test_a_file_that_is_not_there_is_an_error(tmp_path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        read_cluster(tmp_path / "none.toml")

"""What the doctor makes of what it has found out: things that are wrong, and the file for the planner."""

from __future__ import annotations

import json
import math
import socket
from dataclasses import replace
from itertools import permutations

import pytest
import torch

from farspan.cluster.read import parse_cluster
from farspan.errors import LaunchError
from farspan.launch.doctor import devices, gather
from farspan.launch.doctor.cluster_file import format_cluster
from farspan.launch.doctor.examine import Clock, Examination, Link, rounds
from farspan.launch.doctor.facts import DeviceFacts, Facts, FolderFacts, read_facts
from farspan.launch.doctor.findings import find_wrong
from farspan.launch.doctor.probe import listen, probe
from farspan.launch.doctor.show import format_examination
from farspan.launch.hosts.code import versions
from farspan.launch.hosts.host import Host

GIB = 2**30
WELL = Facts(
    python="/py",
    num_cores=8,
    memory_bytes=64 * GIB,
    free_memory_bytes=60 * GIB,
    devices=(),
    devices_error="",
    folders=(FolderFacts(use="shared memory", path="/dev/shm", file_system="tmpfs", free_bytes=32 * GIB),),
    open_files=4096,
    locked_bytes=8 << 20,
    has_rdma=False,
)
GPU = DeviceFacts(name="H100", memory_bytes=80 * GIB, free_bytes=79 * GIB)


def found(facts: dict[str, Facts], *, slots: int = 1, bytes_per_s: dict[str, float] | None = None) -> Examination:
    """Hosts that are well but for their facts; a link is as fast as the slower one of its two hosts."""
    speeds = bytes_per_s or dict.fromkeys(facts, 1e9)
    return Examination(
        hosts=[Host(name=name, num_processes=slots) for name in facts],
        versions={name: versions() for name in facts},
        facts=facts,
        clocks={name: Clock(offset_s=0.0, error_s=0.0) for name in facts},
        links=[
            Link(source=a, destination=b, address=b, latency_s=1e-4, bytes_per_s=min(speeds[a], speeds[b]))
            for a, b in permutations(facts, 2)
        ],
    )


def test_nothing_is_wrong_with_what_is_well() -> None:
    assert find_wrong(found({"a": WELL, "b": replace(WELL, devices=(GPU,))})) == []


@pytest.mark.parametrize(
    ("facts", "what", "hint"),
    [
        (replace(WELL, open_files=512), "b lets a process open 512 files.", "ulimit -n 65536"),
        (replace(WELL, has_rdma=True), "b lets a process lock 8.0 MiB of memory.", "ulimit -l unlimited"),
        (
            replace(WELL, folders=(replace(WELL.folders[0], free_bytes=64 << 20),)),
            "/dev/shm of b has no room.",
            "--shm-size=8g",
        ),
        (replace(WELL, devices=(replace(GPU, free_bytes=9 * GIB),)), "GPU 0 of b is in use.", "nvidia-smi"),
        (replace(WELL, devices_error="too old"), "torch finds no GPU on b", "nvidia-smi"),
    ],
)
def test_each_thing_that_is_wrong_has_a_line_that_mends_it(facts: Facts, what: str, hint: str) -> None:
    (error,) = find_wrong(found({"a": WELL, "b": facts}))
    assert error.what.startswith(what) and hint in error.hint and error.why


def test_more_ranks_than_gpus_and_a_clock_that_is_late() -> None:
    seen = found({"a": WELL, "b": replace(WELL, devices=(GPU,))}, slots=2)
    seen.clocks["b"] = Clock(offset_s=-90.0, error_s=0.1)
    clock, ranks = find_wrong(seen)
    assert clock.what == "the clock of b is 90.0 s behind that of a." and "set-ntp true" in clock.hint
    assert ranks.what == "b has more ranks than GPUs." and ranks.hint == "--hosts b:1"
    seen.clocks["b"] = Clock(offset_s=90.0, error_s=100.0)  # nothing is known of it
    assert [error.what for error in find_wrong(seen)] == [ranks.what]


def test_a_host_that_no_other_reaches_is_one_thing_to_mend() -> None:
    seen = found(dict.fromkeys("abcde", WELL))
    seen.links = [replace(link, error="no") if link.destination == "c" else link for link in seen.links]
    (error,) = find_wrong(seen)
    assert error.what == "a, b, d and 1 more do not reach c by TCP at c."
    assert error.hint.startswith("on c: sudo ufw allow from a\n")
    with pytest.raises(LaunchError, match="no file for the planner"):
        format_cluster(seen)


def test_hosts_that_are_alike_are_one_class_and_one_behind_a_slow_link_is_its_own() -> None:
    gpus = replace(WELL, devices=(GPU,) * 4)
    speeds = {"a": 3e9, "b": 2.5e9, "far": 1e7, "cpu": 2.5e9}
    seen = found({"a": gpus, "b": gpus, "far": gpus, "cpu": WELL}, slots=2, bytes_per_s=speeds)
    seen.links = [replace(link, bytes_per_s=1e6) if link.destination == "cpu" else link for link in seen.links]
    near, far, cpu = parse_cluster(format_cluster(seen)).classes
    assert (near.name, near.kind, near.num_hosts, near.devices_per_host) == ("a", "H100", 2, 4)
    assert near.memory_bytes == 80 * GIB and near.between_bytes_per_s == pytest.approx(2.5e9)
    assert far.num_hosts == 1 and far.between_bytes_per_s == pytest.approx(1e7)
    assert (cpu.name, cpu.kind, cpu.devices_per_host, cpu.memory_bytes) == ("cpu", "cpu", 2, 32 * GIB)
    assert cpu.between_bytes_per_s == pytest.approx(1e6)  # it receives slowly
    assert [each.latency_s for each in (near, far, cpu)] == [pytest.approx(1e-4)] * 3


def test_one_host_has_no_links_between_hosts_and_a_strange_name_is_quoted() -> None:
    name = 'a "card"\n\x7f'
    seen = found({"a": replace(WELL, devices=(replace(GPU, name=name),))})
    (only,) = parse_cluster(format_cluster(seen)).classes
    assert only.between_bytes_per_s == math.inf and only.kind.startswith('a "card"')


def test_many_links_are_shown_by_the_slowest() -> None:
    names = [f"h{i}" for i in range(7)]
    speeds = dict.fromkeys(names, 1e9) | {"h3": 1e7}
    text = format_examination(found(dict.fromkeys(names, WELL), bytes_per_s=speeds))
    assert "h3 > h0" in text and text.endswith("and 12 links that are no slower")
    assert len([line for line in text.splitlines() if "10 MB/s" in line]) == 12


@pytest.mark.parametrize("num_hosts", range(7))
def test_each_pair_is_measured_once_in_each_direction_and_no_host_twice_at_once(num_hosts: int) -> None:
    pairs = [pair for each in rounds(num_hosts) for pair in each]
    assert sorted(pairs) == [(i, j) for i in range(num_hosts) for j in range(num_hosts) if i != j]
    for each in rounds(num_hosts):
        ends = [end for pair in each for end in pair]
        assert len(ends) == len(set(ends))


def test_a_stranger_at_the_port_does_not_disturb_who_knows_the_token() -> None:
    port = listen("known", 5.0)
    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as stranger:
        stranger.sendall(b"wrong")
        assert stranger.recv(1) == b""
    measured = probe("127.0.0.1", port, "known", 5.0)
    assert measured["latency_s"] > 0 and measured["bytes_per_s"] > 1e6
    assert "error" in probe("127.0.0.1", port, "known", 5.0)  # one has been served, and that is all


def test_who_does_not_answer_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert probe("127.0.0.1", port, "known", 0.1)["error"] == "connected, but then: not done within 0.1 s"


@pytest.mark.parametrize("said", [{}, {"python": "/py", "num_cores": "many"}])
def test_what_a_host_says_is_not_believed_blindly(said: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="b says of itself what is not understood"):
        read_facts("b", said)


def test_the_tables_of_one_host_have_its_versions() -> None:
    table = format_examination(found({"a": WELL})).split("\n\n")[0]
    assert all(kind in table and text in table for kind, text in versions().items())


def test_a_host_says_which_limits_and_devices_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resource = pytest.importorskip("resource")
    limits = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], resource.RLIM_INFINITY))
    assert gather._limits() == (1024, -1)
    assert devices.main() == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["devices"]) == torch.cuda.device_count() and bool(said["why"]) != bool(said["devices"])

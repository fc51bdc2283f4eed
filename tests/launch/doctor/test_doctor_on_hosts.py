"""`farspan doctor --hosts`: hosts are network namespaces, and a script in the place of ssh goes into them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.joining.hosts import ADDRESSES, Hosts, are_possible, two_hosts
from tests.support.launcher import SOURCE, TIMEOUT_S

from farspan.cluster import read_cluster

pytestmark = pytest.mark.skipif(not are_possible(), reason="needs root and network namespaces")

SSH = """#!/bin/sh
# HOST LINE: the other host by its address, with the limits and the packages of that one
[ $1 = {address} ] || {{ echo "no route to $1" >&2; exit 255; }}
{before}
exec ip netns exec {name}1 sh -c "$2"
"""


@pytest.fixture
def hosts():
    with two_hosts() as made:
        yield made


def doctor(hosts: Hosts, folder: Path, *options: str, before: str = "", others: str = "") -> tuple[int, str]:
    """Looks from host 0 at both."""
    ssh = folder / "ssh.sh"
    ssh.write_text(SSH.format(address=ADDRESSES[1], name=hosts.name, before=before))
    ssh.chmod(0o755)
    command = ["ip", "netns", "exec", f"{hosts.name}0", sys.executable, "-m", "farspan", "doctor", "--ssh", str(ssh)]
    command += ["--hosts", f"localhost:1,{ADDRESSES[1]}:2{others}", *options]
    variables = {"PYTHONPATH": str(SOURCE), "FARSPAN_DEADLINE": "1"}
    environment = os.environ | variables
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    return done.returncode, done.stdout + done.stderr


def test_hosts_that_are_well_are_measured_for_the_planner(hosts: Hosts, tmp_path: Path) -> None:
    code, output = doctor(hosts, tmp_path, "--out", "cluster.toml")
    assert code == 0 and "nothing is wrong" in output and "Warning" not in output, output
    links = [line.split() for line in output.splitlines() if " > " in line and not line.startswith("from")]
    assert [line[:4] for line in links] == [
        ["localhost", ">", ADDRESSES[1], ADDRESSES[1]],
        [ADDRESSES[1], ">", "localhost", ADDRESSES[0]],  # the address by which the other host is reached
    ], output
    cluster = read_cluster(tmp_path / "cluster.toml")
    assert sorted(each.num_devices for each in cluster.classes) == [1, 2]
    for each in cluster.classes:
        assert 1e6 < each.between_bytes_per_s < 1e12 and 1e-7 < each.latency_s < 0.1, each


def test_what_is_wrong_with_a_host_is_named_with_what_mends_it(hosts: Hosts, tmp_path: Path) -> None:
    """Another torch, few open files, a firewall; and a third host that is not there."""
    other = tmp_path / "other" / "torch-9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    hosts.cut(1)
    before = f'ulimit -n 500\nset -- $1 "$(echo "$2" | sed s#PYTHONPATH=#PYTHONPATH={other.parent}:#)"'
    code, output = doctor(hosts, tmp_path, "--out", "cluster.toml", before=before, others=",10.77.9.9")
    assert code == 1, output
    there = ADDRESSES[1]
    assert "wrong: 10.77.9.9 cannot be reached.\n  why  no route to 10.77.9.9.\n  try  ssh 10.77.9.9" in output, output
    assert f"wrong: {there} has another torch.\n  why  9.9 there, " in output, output
    assert f"  try  on {there}: {sys.executable} -m pip install torch==" in output, output
    assert f"wrong: localhost does not reach {there} by TCP at {there}.\n  why  no connection" in output, output
    assert f"wrong: {there} does not reach localhost by TCP at {ADDRESSES[0]}.\n  why  no connection" in output, output
    assert f"  try  on {there}: sudo ufw allow from {ADDRESSES[0]}\n" in output, output
    assert f"wrong: {there} lets a process open 500 files." in output and "ulimit -n 65536" in output, output
    assert "there is no file for the planner yet" in output and not (tmp_path / "cluster.toml").exists()

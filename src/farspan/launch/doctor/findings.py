"""What is wrong with hosts, each thing in three parts: what, why, and the line that mends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from farspan.errors import LaunchError
from farspan.launch.doctor.examine import Examination, Link
from farspan.launch.doctor.facts import Facts
from farspan.launch.hosts.code import versions
from farspan.launch.hosts.host import Host
from farspan.units import format_bytes, format_seconds

__all__ = ["find_wrong"]

_CLOCK_S = 1.0
"""By more, files seem to come from the future, and logs of two hosts cannot be read side by side."""
_LEAST_FREE_BYTES = {"shared memory": 256 << 20, "temporary files": 1 << 30, "working folder": 1 << 30}
_LEAST_FILES, _FILES_OF_RANK, _FILES_OF_PEER = 1024, 256, 8
_FREE_OF_DEVICE = 0.8
_SHOWN = 3


def find_wrong(found: Examination) -> list[LaunchError]:
    """Returns what is wrong, in the order in which it is best mended."""
    hosts = {host.name: host for host in found.hosts}
    num_ranks = sum(host.num_processes for host in found.hosts)
    wrong = list(found.failures)
    for name, facts in found.facts.items():
        wrong += _versions(hosts[name], found.versions[name], facts)
    for name, clock in found.clocks.items():
        if abs(clock.offset_s) - clock.error_s > _CLOCK_S:
            late = "ahead of" if clock.offset_s > 0 else "behind"
            off, first = format_seconds(abs(clock.offset_s)), next(iter(found.clocks))
            wrong.append(
                LaunchError(
                    f"the clock of {name} is {off} {late} that of {first}.",
                    why="times of files and lines of logs are compared between hosts.",
                    hint="sudo timedatectl set-ntp true     on both",
                )
            )
    wrong += _unreached(found.links)
    for name, facts in found.facts.items():
        wrong += [*_devices(hosts[name], facts), *_folders(name, facts), *_limits(name, facts, num_ranks)]
    return wrong


def _versions(host: Host, theirs: dict[str, str], facts: Facts) -> Iterator[LaunchError]:
    for name, here in versions().items():
        there = theirs.get(name) or "none"
        if there == here:
            continue
        install = f"on {host.name}: {facts.python} -m pip install {name}=={here.split()[0]}"
        if name == "Python":
            install = f"python=/path/of/python{here}     for {host.name} in a file for --hosts"
        elif there.split()[0] == here.split()[0]:  # changed by hand
            install = f"the same files of {name} on {host.name} as here, where {facts.python} finds them"
        yield LaunchError(f"{host.name} has another {name}.", why=f"{there} there, {here} here.", hint=install)


def _unreached(links: Sequence[Link]) -> Iterator[LaunchError]:
    """Yields an error for each host that others do not reach; where none does, it is one thing to mend."""
    address_of = {(link.destination, link.source): link.address for link in links}
    failed = [link for link in links if link.error]
    for destination in dict.fromkeys(link.destination for link in failed):
        own = [link for link in failed if link.destination == destination]
        sources = ", ".join(link.source for link in own[:_SHOWN])
        more = f" and {len(own) - _SHOWN} more" if len(own) > _SHOWN else ""
        does = "does" if len(own) == 1 else "do"
        first = own[0]
        at = f" at {first.address}" if first.address else ""
        sender = address_of.get((first.source, destination)) or first.source
        yield LaunchError(
            f"{sources}{more} {does} not reach {destination} by TCP{at}.",
            why=f"{first.error}; ranks listen at free ports, any from 1024 on, and mostly a firewall is in the way.",
            hint=f"on {destination}: sudo ufw allow from {sender}\n"
            f"or: sudo firewall-cmd --zone=trusted --add-source={sender}",
        )


def _devices(host: Host, facts: Facts) -> Iterator[LaunchError]:
    if facts.devices_error:
        yield LaunchError(
            f"torch finds no GPU on {host.name}, where there is a driver for some.",
            why=f"{facts.devices_error}.",
            hint=f"on {host.name}: nvidia-smi     and a torch for that driver: https://pytorch.org/get-started/locally",
        )
    for number, device in enumerate(facts.devices):
        if device.free_bytes < _FREE_OF_DEVICE * device.memory_bytes:
            yield LaunchError(
                f"GPU {number} of {host.name} is in use.",
                why=f"{format_bytes(device.free_bytes)} of {format_bytes(device.memory_bytes)} are free.",
                hint=f"on {host.name}: nvidia-smi     shows by whom; devices= in a file for --hosts chooses others",
            )
    if 0 < len(facts.devices) < host.num_processes:
        yield LaunchError(
            f"{host.name} has more ranks than GPUs.",
            why=f"{host.num_processes} ranks, {len(facts.devices)} GPUs; NCCL lets no two ranks share one.",
            hint=f"--hosts {host.name}:{len(facts.devices)}",
        )


def _folders(name: str, facts: Facts) -> Iterator[LaunchError]:
    mends = {
        "shared memory": "sudo mount -o remount,size=8G /dev/shm     or docker run --shm-size=8g",
        "temporary files": "TMPDIR=/a/larger/folder",
        "working folder": "remove what is not needed, or start in another folder",
    }
    uses = {"shared memory": "workers of a DataLoader", "temporary files": "logs of ranks", "working folder": "runs"}
    for folder in facts.folders:
        least = _LEAST_FREE_BYTES[folder.use]
        if folder.free_bytes < least:
            yield LaunchError(
                f"{folder.path} of {name} has no room.",
                why=f"{format_bytes(folder.free_bytes)} are free; {uses[folder.use]} need {format_bytes(least)}.",
                hint=f"on {name}: {mends[folder.use]}",
            )


def _limits(name: str, facts: Facts, num_ranks: int) -> Iterator[LaunchError]:
    least = max(_LEAST_FILES, _FILES_OF_RANK + _FILES_OF_PEER * num_ranks)
    if 0 <= facts.open_files < least:
        yield LaunchError(
            f"{name} lets a process open {facts.open_files} files.",
            why=f"a rank of {num_ranks} has connections with the others, and needs {least}.",
            hint=f"on {name}: ulimit -n 65536\nfor good: '* - nofile 65536' in /etc/security/limits.conf",
        )
    if facts.has_rdma and facts.locked_bytes >= 0:
        yield LaunchError(
            f"{name} lets a process lock {format_bytes(facts.locked_bytes)} of memory.",
            why="its InfiniBand card reads and writes locked memory alone.",
            hint=f"on {name}: ulimit -l unlimited\nfor good: '* - memlock unlimited' in /etc/security/limits.conf",
        )

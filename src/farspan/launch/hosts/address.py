"""Addresses and ports by which the ranks of several hosts find each other."""

from __future__ import annotations

import socket

from farspan.errors import LaunchError

__all__ = ["free_port", "own_address_towards", "resolved"]


def free_port() -> int:
    """Returns a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def own_address_towards(name: str) -> str:
    """Returns the address from which this machine would send to another one, by its routes; sends nothing."""
    address = resolved(name)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise LaunchError(
                f"there is no way to {name}.", why=f"{address}: {error.strerror}.", hint="ip route"
            ) from None
        return str(probe.getsockname()[0])


def resolved(name: str) -> str:
    """Returns the address of a host by the name that ssh gets."""
    bare = name.rpartition("@")[2].strip("[]")
    try:
        return str(socket.getaddrinfo(bare, 9, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError as error:
        raise LaunchError(
            f"the address of {bare} is not known.",
            why=f"{error.strerror}: ssh may know it by a name of its own.",
            hint="--hosts with an address, or a name of DNS or /etc/hosts",
        ) from None

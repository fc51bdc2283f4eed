"""Finds the address of this host that leads to the other ranks."""

from __future__ import annotations

import ipaddress
import socket

from farspan.errors import LaunchError

__all__ = ["LOOPBACK", "address_towards", "is_loopback"]

LOOPBACK = "127.0.0.1"


def address_towards(host: str) -> str:
    """Returns the address from which the system would send to `host`; sends nothing.

    Raises:
        LaunchError: The host is unknown, or there is no route to it.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"this host has no way to {host}.",
            why=f"{error.strerror or error}; {host} is where rank 0 is said to be.",
            hint="MASTER_ADDR=<an address of rank 0's host that all others reach>",
        ) from None


def is_loopback(address: str) -> bool:
    """Returns whether messages to an address stay on the host that sends them; False for what is no address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False

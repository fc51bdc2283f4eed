"""Listens on all addresses of this host, of IPv4 and IPv6, for other hosts may reach it by any of them."""

from __future__ import annotations

import socket

__all__ = ["listen_everywhere"]


def listen_everywhere(port: int = 0) -> socket.socket:
    """Returns a socket that listens at a port, 0 for a free one.

    Raises:
        OSError: The port is taken, or not for this user.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))

"""Links within a host, of which nothing else is known."""

from __future__ import annotations

__all__ = ["within_host"]

_SAME_HOST_BYTES_PER_S, _SAME_HOST_LATENCY_S = 3e9, 3e-5
"""Bandwidth and latency between processes of one host, as measured by benchmarks/transport."""
_PCIE_BYTES_PER_S, _PCIE_LATENCY_S = 2.5e10, 2e-5


def within_host(kind: str) -> tuple[float, float]:
    """Returns bytes per second and latency in seconds between two devices of that kind in one host."""
    if kind == "cpu":
        return _SAME_HOST_BYTES_PER_S, _SAME_HOST_LATENCY_S
    return _PCIE_BYTES_PER_S, _PCIE_LATENCY_S

"""Finds over which connections of a node a message goes, and with which header over each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.control.tree.numbers import children, client_towards

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farspan.control.tree.message import Message
    from farspan.control.wire import Header

__all__ = ["PARENT", "deliveries"]

PARENT = -1
"""Stands for the connection to the node above."""


def deliveries(
    message: Message, node: int, world_size: int, clients: Sequence[int]
) -> Iterator[tuple[Sequence[int], Header]]:
    """Yields connections, by the ranks at their other ends, and the header that goes over each of these.

    Args:
        message: Of the node.
        node: In the process of which rank it is.
        world_size: How many ranks there are.
        clients: All connections but that to the node above.
    """
    if message.is_for_parent:
        yield (PARENT,), message.header
        return
    if message.to is None:
        yield clients, message.header
        return
    by_client: dict[int, list[int]] = {}
    for rank in message.to:
        client = client_towards(rank, node)
        assert client is not None
        by_client.setdefault(client, []).append(rank)
    for client, ranks in by_client.items():
        is_relay = client != node and children(client, world_size)
        yield (client,), {**message.header, "to": ranks} if is_relay else message.header

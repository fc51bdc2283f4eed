"""Knows for whom a connection may speak: for its own rank, and for those that are connected by way of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.control.tree.blocks import ranks_in
from farspan.control.tree.numbers import client_towards, ranks_below
from farspan.control.wire import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farspan.control.tree.blocks import Parts
    from farspan.control.wire import Buffer, Header

__all__ = ["Speakers"]


class Speakers:
    """The connections of one node.

    Args:
        node: In the process of which rank it is.
        world_size: How many ranks there are.
    """

    def __init__(self, node: int, world_size: int) -> None:
        self._node = node
        self._world_size = world_size
        self._below: dict[int, frozenset[int]] = {}

    def below(self, client: int) -> frozenset[int]:
        """Returns the ranks that the connection of `client` leads to."""
        found = self._below.get(client)
        if found is None:
            ranks = [client] if client == self._node else ranks_below(client, self._world_size)
            found = self._below[client] = frozenset(ranks)
        return found

    def one(self, client: int, header: Header) -> int:
        """Returns the rank whose words have come over the connection of `client`.

        Raises:
            ProtocolError: It may not speak for that rank.
        """
        speaker = header.get("from", client)
        if type(speaker) is not int or client_towards(speaker, self._node) != client:
            raise ProtocolError(f"rank {client} speaks for {str(speaker)[:40]}")
        return speaker

    def many(self, client: int, header: Header) -> Sequence[int]:
        """Returns the same, for what several ranks may say at once."""
        if "ranks" not in header:
            return (client if "from" not in header else self.one(client, header),)
        ranges = tuple([(first, last) for first, last in header["ranks"]])
        return self._checked(client, ranks_in(ranges, self._world_size))

    def add_parts(self, parts: Parts, client: int, header: Header, payload: Buffer) -> Sequence[int]:
        """Takes what `client` gives of a gather, its own part or those of several ranks; returns who these are."""
        parts.receiver = header.get("for")
        if not header.get("is_merged"):
            parts.add(client, payload)
            return (client,)
        return self._checked(client, parts.add_blocks(payload, self._world_size))

    def _checked(self, client: int, ranks: Sequence[int]) -> Sequence[int]:
        if not ranks or not self.below(client).issuperset(ranks):
            raise ProtocolError(f"rank {client} speaks for {len(ranks)} ranks, not all of them below it")
        return ranks

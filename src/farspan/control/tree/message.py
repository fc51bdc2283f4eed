"""A message that a node of the tree sends, with what the server that moves it knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farspan.control.wire import Buffer, Header

__all__ = ["Message", "Node"]


class Message(NamedTuple):
    """One message of a node.

    Attributes:
        to: Ranks below it; None for all that still listen.
        header: Of the frame.
        payload: Likewise.
        is_for_parent: It goes to the node above instead.
    """

    to: tuple[int, ...] | None
    header: Header
    payload: Buffer = b""
    is_for_parent: bool = False


class Node(Protocol):
    """The hub, or a relay: a state machine without sockets.

    Attributes:
        rank: In whose process it is.
        ranks: That one and all below it.
        world_size: How many there are in all.
        joined: Ranks that have connected to it.
        ended: Ranks below it that have said bye.
        heard: Ranks below it that know of a failure, and so need nothing more.
        died: Ranks below it whose connection, or that of a rank above them, closed without a goodbye.
    """

    rank: int
    world_size: int
    joined: set[int]
    ended: set[int]
    died: set[int]
    heard: set[int]

    @property
    def ranks(self) -> Sequence[int]: ...

    def on_joined(self, rank: int) -> list[Message]:
        """Handles the arrival of a rank; its first message comes after this."""
        ...

    def on_message(self, rank: int, header: Header, payload: Buffer = b"") -> list[Message]:
        """Handles a message over the connection of `rank`, about itself or ranks below it."""
        ...

    def on_gone(self, rank: int) -> list[Message]:
        """Handles the end of a rank's connection."""
        ...

    def on_silent(self, rank: int) -> list[Message]:
        """No sign of life has come from a rank's host for long. That rank gets the failure too: it may still hear."""
        ...

    def on_tick(self) -> list[Message]:
        """About LOOK_S have passed since this was called last."""
        ...

    def on_parent(self, header: Header, payload: Buffer) -> list[Message]:
        """Handles a message from the node above."""
        ...

    def on_parent_lost(self, failure: Header) -> list[Message]:
        """Handles the loss of the connection to the node above, which means this failure."""
        ...

    def on_shutdown(self) -> list[Message]:
        """Handles the end of this node, whoever is still there."""
        ...

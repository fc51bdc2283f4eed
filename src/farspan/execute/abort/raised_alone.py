"""An exception of the user's code that one rank has, and others perhaps not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from farspan.call.infer.entry import Raised
from farspan.control.channel import SideChannel
from farspan.control.text import described
from farspan.errors import RemoteError

__all__ = ["raised_alone"]


@contextlib.contextmanager
def raised_alone(side: SideChannel, raised: Raised | None) -> Iterator[None]:
    """The user's code has `raised` something on this rank, before it had its data. If no other rank's has, and the
    programs turn out to differ, that is why: it is raised here, and the other ranks hear of it.
    """
    if raised is None:
        yield
        return
    side.raised = {**described(raised.error), "traceback": raised.traceback}
    try:
        yield
    except RemoteError as error:
        if error.rank != side.rank:
            raise
        raised.error.add_note(f"{error.why}\nIt was raised at\n{raised.traceback}")
        raise raised.error from raised.error.__cause__
    finally:
        side.raised = None

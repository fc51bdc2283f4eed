"""Leaves a record in the store of a job that a rank will not come: `python -m farspan.comm.rendezvous.messenger WHY`.

The process of the rank starts it when it ends before it has called `farspan.distribute`.
"""

from __future__ import annotations

import sys

from farspan.comm.rendezvous.group import find_peers
from farspan.comm.rendezvous.records import Records, absence

__all__ = ["main"]

_PATIENCE_S = 10.0


def main(why: str) -> None:
    """Leaves the word in the name of the rank of which this process has the variables.

    Args:
        why: Why it will not come, for people.

    Raises:
        LaunchError, RuntimeError: The store is not there any more.
    """
    peers = find_peers(_PATIENCE_S)
    if peers is None:
        return
    records = Records(peers, _PATIENCE_S)
    records.write(f"rank {peers.rank}", absence(why))
    # Who connects by way of this rank reads one of these.
    records.write("hub" if peers.rank == 0 else f"relay {peers.rank}", absence(why))


if __name__ == "__main__":
    main(sys.argv[1])

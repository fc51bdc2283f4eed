"""Messages that sender and receiver copy together, between three real processes, one of which is killed at the end."""

from __future__ import annotations

import errno
import gc
import os
import signal
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from tests.comm.same_host_ranks import (
    LONG_S,
    NUM_RANKS,
    Ranks,
    check,
    check_end,
    content,
    empty,
    raises,
    run,
    wait_first,
    wait_for_end,
)
from tests.support.ranks import Finished, run_processes

from farspan.comm.same_host.chunks import WHOLE_BYTES, OutstandingWrites
from farspan.comm.same_host.packet_socket import Lane

LARGE = 9 << 20


def copied_together(ranks: Ranks) -> None:
    """A sender that waits copies chunks; one that only asks leaves them all to the receiver."""
    transport = ranks.join()
    for size in (WHOLE_BYTES + 1, LARGE + 5):
        for helps in (True, False):
            name = f"{size} {helps}"
            if ranks.rank == 1:
                found = empty(size)
                reading = transport._connections[0].memory
                if helps:
                    wait_first(reading, "read", lambda name=name: ranks.store.wait([name], timedelta(seconds=LONG_S)))
                transport.receive(found, 0, 0).wait(LONG_S)
                assert torch.equal(found, content(size, 6))
                reading.__dict__.pop("read", None)
                ranks.store.set(f"{name} received", "")
            elif ranks.rank == 0:
                written: list[int] = []
                writing = transport._connections[1].memory
                wait_first(writing, "write", lambda written=written, name=name: note(ranks, written, name))
                sending = transport.send(content(size, 6), 1, 0)
                if helps:
                    sending.wait(LONG_S)
                    assert written
                else:
                    while not ranks.store.check([f"{name} received"]):
                        sending.is_done()
                    sending.wait(LONG_S)
                    assert not written
                writing.__dict__.pop("write", None)
    ranks.barrier()


def late_chunk(ranks: Ranks) -> None:
    """A receive is not over before the sender has written its chunk, and till then its memory is kept."""
    for is_aborted in (False, True):
        take_late(ranks, is_aborted)


def take_late(ranks: Ranks, is_aborted: bool) -> None:
    transport = ranks.join()
    names = [f"{name} {is_aborted}" for name in ("taken", "write it")]
    if ranks.rank == 1:
        found = empty(LARGE)
        alive = weakref.ref(found)
        work = transport.receive(found, 0, 0)
        wait_first(transport._connections[0].memory, "read", lambda: ranks.store.wait(names[:1]))
        while not OutstandingWrites._kept:
            assert not work.is_done()
        raises(TimeoutError, "rank 0", work.wait, 0.05)
        if is_aborted:
            transport.abort()
            raises(RuntimeError, "connection aborted", work.wait, LONG_S)
            del work, found, transport
            gc.collect()
            assert alive() is not None
            ranks.store.set(names[1], "")
        else:
            ranks.store.set(names[1], "")
            work.wait(LONG_S)
            assert torch.equal(found, content(LARGE, 7))
            del work, found
            assert alive() is None
        ranks.barrier()
    elif ranks.rank == 0:

        def hold_up() -> None:
            ranks.store.set(names[0], "")
            ranks.store.wait(names[1:])

        wait_first(transport._connections[1].memory, "write", hold_up)
        transport.send(content(LARGE, 7), 1, 0).wait(LONG_S)  # it was acked before
        ranks.barrier()
    else:
        ranks.barrier()
    OutstandingWrites._kept.clear()


def copying_fails(ranks: Ranks) -> None:
    """At either end: it says which memory it is about, the other that the connection is closed.

    Who cannot write its chunk says so also where the receiver, which has read all others, has acked the message.
    """
    for failing in ("read", "write"):
        transport = ranks.join()
        if ranks.rank == 1:
            work, memory = transport.receive(empty(LARGE), 0, 0), transport._connections[0].memory
            if failing == "read":
                memory.read = refuse
                raises(RuntimeError, "cannot read", work.wait, LONG_S)
                raises(RuntimeError, "of rank 0's memory", work.wait, LONG_S)
            else:
                wait_first(memory, "read", lambda: ranks.store.wait(["refused"]))
                tell_first_ack(ranks, transport._connections[0].acks)
                raises(RuntimeError, "Connection closed by peer (rank 0)", work.wait, LONG_S)
        elif ranks.rank == 0:
            sending = transport.send(content(LARGE, 8), 1, 0)
            if failing == "read":
                raises(RuntimeError, "Connection closed by peer (rank 1)", sending.wait, LONG_S)
            else:
                memory = transport._connections[1].memory
                memory.write = refuse
                wait_first(memory, "write", lambda: (ranks.store.set("refused", ""), ranks.store.wait(["acked"])))
                raises(RuntimeError, "cannot write", sending.wait, LONG_S)
                raises(RuntimeError, "of rank 1's memory", sending.wait, LONG_S)
        ranks.barrier()
    OutstandingWrites._kept.clear()


def tell_first_ack(ranks: Ranks, acks: Lane) -> None:
    send = acks.send

    def sends_and_tells(packet: bytes | memoryview, transfer: Any = None) -> bool:
        is_open = send(packet, transfer)
        ranks.store.set("acked", "")
        return is_open

    acks.send = sends_and_tells


def refuse(here: int, there: int, size: int) -> None:
    raise PermissionError(errno.EPERM, "not permitted")


def note(ranks: Ranks, written: list[int], name: str) -> None:
    written.append(1)
    ranks.store.set(name, "")


def killed_with_a_chunk(ranks: Ranks) -> None:
    """Who dies with a chunk that it has not written is named, and the memory is kept no longer; the others go on."""
    transport = ranks.join()
    if ranks.rank == 2:

        def die() -> None:
            ranks.store.set("killed", "")
            os.kill(os.getpid(), signal.SIGKILL)

        wait_first(transport._connections[0].memory, "write", die)
        transport.send(content(LARGE, 0), 0, 0).wait(LONG_S)
    if ranks.rank == 0:
        work = transport.receive(empty(LARGE), 2, 0)
        wait_first(transport._connections[2].memory, "read", lambda: ranks.store.wait(["killed"]))
        raises(RuntimeError, "Connection closed by peer (rank 2)", work.wait, LONG_S)
    other = 1 - ranks.rank
    sending, found = transport.send(content(LARGE, ranks.rank), other, 0), empty(LARGE)
    transport.receive(found, other, 0).wait(LONG_S)
    sending.wait(LONG_S)
    assert torch.equal(found, content(LARGE, other))
    assert not OutstandingWrites._kept
    wait_for_end(ranks)


CASES: list[Callable[[Ranks], None]] = [copied_together, late_chunk, copying_fails, killed_with_a_chunk]


@pytest.fixture(scope="module")
def finished() -> list[Finished]:
    """What the three ranks said."""
    return run_processes(NUM_RANKS, __file__, timeout_s=2 * LONG_S)


@pytest.mark.parametrize("case", CASES)
def test_case(finished: list[Finished], case: Callable[[Ranks], None]) -> None:
    check(finished, case.__name__, is_last=case is CASES[-1])


def test_ranks_end_well(finished: list[Finished]) -> None:
    check_end(finished)


if __name__ == "__main__":
    run(CASES)

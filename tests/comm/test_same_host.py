"""The same-host transport between three real processes, one of which is killed at the end."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

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
    wait_for_end,
)
from tests.support.ranks import Finished, run_processes

from farspan.comm.same_host import packet_socket as lane
from farspan.comm.same_host import peers
from farspan.comm.same_host.chunks import WHOLE_BYTES
from farspan.comm.same_host.copies import INLINE_BYTES, MAX_ANNOUNCED, SameHostTransport

MANY = 2000
SIZES = [0, 1, 100, INLINE_BYTES, INLINE_BYTES + 1, 3 << 20, 7, 2 * INLINE_BYTES, WHOLE_BYTES, WHOLE_BYTES + 1, 0]


def fifo(ranks: Ranks, is_posted_before: bool = True) -> None:
    """Every pair, both directions, two channels of which the second is received first; posted before, and after."""
    transport = ranks.join()
    others = [rank for rank in range(NUM_RANKS) if rank != ranks.rank]
    order = [(src, channel) for src in others for channel in (5, -3)]
    arrived = {key: [empty(size) for size in SIZES] for key in order}

    def post() -> list:
        return [transport.receive(flat, src, channel) for src, channel in order for flat in arrived[src, channel]]

    works = post() if is_posted_before else []
    ranks.barrier()
    for dst in others:
        for number, size in enumerate(SIZES):
            works += [transport.send(content(size, ranks.rank + number + channel), dst, channel) for channel in (-3, 5)]
    ranks.barrier()
    works += [] if is_posted_before else post()
    for work in reversed(works):
        work.wait(LONG_S)
    assert all(work.is_done() and work.flat is None for work in works)
    for (src, channel), tensors in arrived.items():
        for number, found in enumerate(tensors):
            assert torch.equal(found, content(len(found), src + number + channel)), (src, channel, number)
    if is_posted_before:
        fifo(ranks, is_posted_before=False)


def waits_for_sends_first(ranks: Ranks) -> None:
    """Around a circle, each waits for its send before its receive: who waits must serve the others."""
    transport = ranks.join()
    received = content(1 << 20, ranks.rank)
    for _ in range(2 * NUM_RANKS):
        sent, received = received, empty(1 << 20)
        receiving = transport.receive(received, (ranks.rank - 1) % NUM_RANKS, 0)
        transport.send(sent, (ranks.rank + 1) % NUM_RANKS, 0).wait(LONG_S)
        receiving.wait(LONG_S)
    assert torch.equal(received, content(1 << 20, ranks.rank))


def many_sends(ranks: Ranks) -> None:
    """Sends without any receive do not block; what was announced comes, and lets go, while one side does other work."""
    lane._SEND_BUFFER_BYTES = 212992 // 2  # Linux doubles it, to its default
    transport = ranks.join()
    for size in (INLINE_BYTES + 1, 4000):
        source = content(size + MANY, 1)
        num_first = MAX_ANNOUNCED if size > INLINE_BYTES else 0
        if ranks.rank == 0:
            works = [[transport.send(source[i : i + size], 1, channel) for i in range(MANY)] for channel in (0, 1)]
            assert not works[1][-1].is_done()
            ranks.barrier()
            ranks.barrier()
            for work in works[0][:num_first] + works[1][:num_first]:
                work.wait(LONG_S)
            ranks.barrier()
            for work in works[1] + works[0]:
                work.wait(LONG_S)
        elif ranks.rank == 1:
            ranks.barrier()
            for numbers in (range(num_first), range(num_first, MANY)):
                for channel in (1, 0):  # the second first: channels do not wait for each other
                    for i in numbers:
                        found = empty(size)
                        transport.receive(found, 0, channel).wait(LONG_S)
                        assert torch.equal(found, source[i : i + size]), (size, channel, i)
                if numbers.stop == num_first:
                    ranks.barrier()
                    ranks.barrier()
        else:
            for _ in range(3):
                ranks.barrier()


def times_out(ranks: Ranks) -> None:
    """Time-outs name the peer and break nothing."""
    transport = ranks.join()
    for size in (10, 1 << 20):
        found = empty(size)
        if ranks.rank == 0:
            work = transport.receive(found, 1, 0)
            raises(TimeoutError, "rank 1", work.wait, 0.0)
            raises(TimeoutError, "rank 1", work.wait, 0.05)
            ranks.barrier()
            work.wait(LONG_S)
            assert torch.equal(found, content(size, 3))
        elif ranks.rank == 1:
            unread = transport.send(content(1 << 20, 4), 2, 0)
            raises(TimeoutError, "rank 2", unread.wait, 0.05)
            ranks.barrier()
            transport.send(content(size, 3), 0, 0).wait(LONG_S)
        else:
            ranks.barrier()


def wrong_size(ranks: Ranks) -> None:
    """An error of that receive alone, posted before or after; the sender's memory is let go."""
    transport = ranks.join()
    for size in (10, 1 << 20):
        for is_posted_before in (True, False):
            found = [empty(size - 1), empty(size)]
            if ranks.rank == 1:
                works = [transport.receive(flat, 0, 0) for flat in found if is_posted_before]
                ranks.barrier()
                works = works or [transport.receive(flat, 0, 0) for flat in found]
                raises(RuntimeError, f"rank 0 sent {size} bytes where {size - 1} were", works[0].wait, LONG_S)
                raises(RuntimeError, f"rank 0 sent {size} bytes where {size - 1} were", works[0].is_done)
                works[1].wait(LONG_S)
                assert torch.equal(found[1], content(size, 2))
            else:
                works = [transport.send(content(size, seed), 1, 0) for seed in (1, 2) if ranks.rank == 0]
                ranks.barrier()
                for work in works:
                    work.wait(LONG_S)


def lets_go(ranks: Ranks) -> None:
    """A sent tensor lives until it is acked, whatever becomes of the work, and no longer."""
    transport = ranks.join()
    if ranks.rank == 0:
        tensor = content(1 << 20, 4)
        alive = weakref.ref(tensor)
        work = transport.send(tensor, 1, 0)
        del tensor
        later = transport.send(content(1 << 20, 5), 1, 0)
        assert not work.is_done() and alive() is not None
        del work
        assert alive() is not None
        ranks.barrier()
        later.wait(LONG_S)
        assert alive() is None
    else:
        ranks.barrier()
        for seed in (4, 5) if ranks.rank == 1 else ():
            found = empty(1 << 20)
            buffer = weakref.ref(found)
            transport.receive(found, 0, 0).wait(LONG_S)
            assert torch.equal(found, content(1 << 20, seed))
            del found
            assert buffer() is None


def abort(ranks: Ranks) -> None:
    """From another thread, in the middle of a wait; the peers notice it, not the end of their wait."""
    transport = ranks.join()
    peer = (ranks.rank + 1) % NUM_RANKS
    works = [
        transport.receive(empty(10), peer, 0),
        transport.send(content(1 << 20, 0), peer, 0),
        transport.receive(empty(10), 0 if ranks.rank else peer, 1),
    ]
    ranks.barrier()
    if ranks.rank == 0:
        threading.Timer(0.2, transport.abort).start()
        raises(RuntimeError, "connection aborted", works[2].wait, LONG_S)
        for work in works:
            raises(RuntimeError, "connection aborted", work.is_done)
            raises(RuntimeError, "connection aborted", work.wait, LONG_S)
        raises(RuntimeError, "connection aborted", transport.send, empty(1), 1, 0)
        raises(RuntimeError, "connection aborted", transport.receive, empty(1), 1, 0)
        transport.abort()
    else:
        raises(RuntimeError, "Connection closed by peer (rank 0)", works[2].wait, LONG_S)
        raises(RuntimeError, "Connection closed by peer (rank 0)", transport.send, empty(1), 0, 0)
        raises(RuntimeError, "Connection closed by peer (rank 0)", transport.receive(empty(1), 0, 2).is_done)


def sent_before_the_end(ranks: Ranks) -> None:
    """What a rank has sent and acked before it ended well still counts; what it can no longer give is an error."""
    transport = ranks.join()
    if ranks.rank == 1:
        found = empty(1 << 20)
        transport.receive(found, 0, 0).wait(LONG_S)
        for seed in (1, 2):
            transport.send(content(10, seed), 0, 0).wait(LONG_S)
        transport.send(content(1 << 20, 3), 0, 0)
        transport.send(content(10, 4), 0, 1).wait(LONG_S)
        ranks.store.set("all sent", "")
        ranks.store.wait(["not to be read"], timedelta(seconds=LONG_S))
        del transport
        gc.collect()  # the large send refers to the transport
        ranks.barrier()
    elif ranks.rank == 0:
        sending = transport.send(content(1 << 20, 1), 1, 0)
        ranks.store.wait(["all sent"], timedelta(seconds=LONG_S))
        setattr(transport, "serve", lambda *_: None)  # noqa: B010  what it has sent stays where it is
        transport.send(content(10, 1), 1, 7)  # makes the other's close a reset
        del transport.serve
        ranks.store.set("not to be read", "")
        ranks.barrier()
        first, later = empty(10), empty(10)
        transport.receive(first, 1, 0).wait(LONG_S)
        sending.wait(LONG_S)
        second = transport.receive(later, 1, 0)
        second.wait(LONG_S)
        assert torch.equal(first, content(10, 1)) and torch.equal(later, content(10, 2))
        large = transport.receive(empty(1 << 20), 1, 0)
        raises(RuntimeError, "Connection closed by peer (rank 1)", large.wait, LONG_S)
        transport.receive(first, 1, 1).wait(LONG_S)
        assert torch.equal(first, content(10, 4))
    else:
        ranks.barrier()


def copying_is_forbidden(ranks: Ranks) -> None:
    """Where a rank may not read or not write, both ends of its pairs know; the other ranks are peers."""

    def forbid(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    expect_without_rank_1(ranks, "_process_vm_readv", forbid)
    expect_without_rank_1(ranks, "_process_vm_writev", forbid)


def is_elsewhere(ranks: Ranks) -> None:
    """Nobody waits for a rank on another host, nor for one that cannot even begin."""

    def fail() -> list[str]:
        raise FileNotFoundError("/proc")

    expect_without_rank_1(ranks, "_host_identity", fail)
    expect_without_rank_1(ranks, "_host_identity", lambda: ["elsewhere"])


def expect_without_rank_1(ranks: Ranks, name: str, other: Callable) -> None:
    num_before = ranks.num_exchanges
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(peers, name, other)
        transport = SameHostTransport.join(ranks.rank, ranks.exchange, LONG_S)
    assert ranks.num_exchanges == num_before + 2
    if ranks.rank == 1:
        assert transport is None
    else:
        assert transport is not None
        assert [rank for rank in range(NUM_RANKS) if transport.reaches(rank)] == [2 - ranks.rank]


def killed(ranks: Ranks) -> None:
    """The others notice before their wait ends, though a fork of the killed rank keeps its sockets; they go on."""
    transport = ranks.join()
    waiting = [transport.receive(empty(10), 2, 0), transport.send(content(1 << 20, 0), 2, 0)] if ranks.rank < 2 else []
    ranks.barrier()
    if ranks.rank == 2:
        if os.fork() == 0:
            for descriptor in range(3):
                os.close(descriptor)
            signal.alarm(5)
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)
    raises(RuntimeError, "Connection closed by peer (rank 2)", waiting[ranks.rank].wait, LONG_S)
    other = 1 - ranks.rank
    sending, found = transport.send(content(1 << 20, ranks.rank), other, 0), empty(1 << 20)
    transport.receive(found, other, 0).wait(LONG_S)
    sending.wait(LONG_S)
    assert torch.equal(found, content(1 << 20, other))
    wait_for_end(ranks)


CASES: list[Callable[[Ranks], None]] = [
    fifo,
    waits_for_sends_first,
    many_sends,
    times_out,
    wrong_size,
    lets_go,
    abort,
    sent_before_the_end,
    copying_is_forbidden,
    is_elsewhere,
    killed,
]


@pytest.fixture(scope="module")
def finished() -> list[Finished]:
    """What the three ranks said."""
    return run_processes(NUM_RANKS, __file__, timeout_s=2 * LONG_S)


@pytest.mark.parametrize("case", CASES)
def test_case(finished: list[Finished], case: Callable[[Ranks], None]) -> None:
    check(finished, case.__name__, is_last=case is CASES[-1])


def test_ranks_end_well(finished: list[Finished]) -> None:
    check_end(finished)


def test_threads_of_one_process_are_not_same_host_peers() -> None:
    blobs: list[bytes] = [b"", b""]
    barrier = threading.Barrier(2, timeout=LONG_S)

    def join(rank: int) -> SameHostTransport | None:
        def exchange(blob: bytes) -> list[bytes]:
            blobs[rank] = blob
            barrier.wait()
            gathered = list(blobs)
            barrier.wait()
            return gathered

        return SameHostTransport.join(rank, exchange, LONG_S)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(join, range(2), timeout=LONG_S)) == [None, None]


if __name__ == "__main__":
    run(CASES)

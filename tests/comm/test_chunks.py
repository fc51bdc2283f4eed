"""Chunks of a large message, of which each is copied by one of two: all of them, once, whoever takes which."""

from __future__ import annotations

import gc
import socket
import weakref

import pytest
import torch

from farspan.comm.same_host.chunks import WHOLE_BYTES, Chunk, ChunkQueue, OutstandingWrites, take_chunk

SOURCE = 1 << 40
MIB = 1 << 20


class Over:
    """A transfer."""

    def __init__(self) -> None:
        self.num_ends = 0

    def end(self) -> None:
        self.num_ends += 1


@pytest.mark.parametrize("size", [WHOLE_BYTES + 1, 3 * MIB - 5, 16 * MIB, 64 * MIB + 123])
@pytest.mark.parametrize("peer_takes", [0, 1, 3])
def test_every_byte_is_copied_once(size: int, peer_takes: int) -> None:
    queue, outstanding = ChunkQueue(), OutstandingWrites()
    flat = torch.empty(size, dtype=torch.uint8)
    read: list[Chunk] = []
    written: list[Chunk] = []

    def copy(destination: int, source: int, num_bytes: int) -> None:
        read.append(Chunk(0, source, destination, num_bytes))
        for _ in range(peer_takes):
            chunk = take_chunk(queue.exit)
            written.extend([chunk] if chunk is not None else [])

    write = queue.copy(flat, SOURCE, copy, outstanding)
    assert write.num_chunks == len(written) and bool(written) == bool(peer_takes)
    place = 0
    for chunk in sorted(read + written, key=lambda chunk: chunk.source):
        assert (chunk.source, chunk.destination) == (SOURCE + place, flat.data_ptr() + place)
        assert chunk.size > 0
        place += chunk.size
    assert place == size
    assert take_chunk(queue.exit) is None
    queue.close()


def test_more_chunks_than_the_socket_takes() -> None:
    queue, outstanding = ChunkQueue(), OutstandingWrites()
    queue._entry.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    flat = torch.empty(64 * MIB, dtype=torch.uint8)
    sizes: list[int] = []
    taken: list[Chunk] = []

    def copy(destination: int, source: int, num_bytes: int) -> None:
        sizes.append(num_bytes)
        if not taken:
            while (chunk := take_chunk(queue.exit)) is not None:
                taken.append(chunk)

    write = queue.copy(flat, SOURCE, copy, outstanding)
    assert 0 < write.num_chunks == len(taken) < 32
    assert sum(sizes) + sum(chunk.size for chunk in taken) == flat.nbytes
    queue.close()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_fails_is_withdrawn(error: type[BaseException]) -> None:
    """But what the peer has taken is kept: it writes to that memory whenever it likes."""
    queue, outstanding = ChunkQueue(), OutstandingWrites()
    flat = torch.empty(16 * MIB, dtype=torch.uint8)
    alive = weakref.ref(flat)
    taken: list[Chunk | None] = []

    def copy(*_: int) -> None:
        taken.append(take_chunk(queue.exit))
        raise error

    with pytest.raises(error):
        queue.copy(flat, SOURCE, copy, outstanding)
    assert take_chunk(queue.exit) is None
    (chunk,) = taken
    assert chunk is not None
    del flat
    gc.collect()
    assert alive() is not None
    outstanding.end_chunks(chunk.message, 1)
    gc.collect()  # the error holds the frame
    assert alive() is None
    queue.close()


@pytest.mark.parametrize("process_has_ended", [False, True])
def test_a_loan_outlives_all_who_know_of_it(process_has_ended: bool) -> None:
    outstanding, transfer = OutstandingWrites(), Over()
    flat = torch.empty(MIB)
    alive = weakref.ref(flat)
    write = outstanding.begin(flat)
    write.num_chunks, write.transfer = 1, transfer
    message = write.message
    del flat, write
    gc.collect()
    assert alive() is not None
    if process_has_ended:
        outstanding.end()
        del outstanding
    else:
        outstanding.end_chunks(message, 1)
    assert alive() is None
    assert transfer.num_ends == (not process_has_ended)


def test_a_transfer_is_over_with_its_last_chunk() -> None:
    outstanding, transfers = OutstandingWrites(), [Over(), Over()]
    for transfer in transfers:
        write = outstanding.begin(torch.empty(1))
        write.num_chunks, write.transfer = 2, transfer
    for message, ends in ((1, [0, 0]), (2, [0, 0]), (2, [0, 1]), (1, [1, 1])):
        outstanding.end_chunks(message, 1)
        assert [transfer.num_ends for transfer in transfers] == ends


def test_a_closed_queue_has_no_chunks() -> None:
    queue = ChunkQueue()
    other = socket.socket(fileno=queue.exit.dup().detach())
    queue.close()
    assert take_chunk(other) is None
    other.close()

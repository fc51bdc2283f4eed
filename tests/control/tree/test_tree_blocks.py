"""Parts of all-gathers in blocks: whatever comes over the network is taken whole, or is a clear error."""

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.control.tree.blocks import Parts, parts_by_rank
from farspan.control.wire import ProtocolError


@given(st.lists(st.binary(max_size=3), min_size=1, max_size=12), st.data())
def test_parts_come_back_however_they_were_put_together(parts: list[bytes], data: st.DataObject) -> None:
    whole = Parts()
    ranks = data.draw(st.permutations(range(len(parts))))
    while ranks:
        count = data.draw(st.integers(1, len(ranks)))
        group = Parts()
        for rank in ranks[:count]:
            group.add(rank, parts[rank])
        assert whole.add_blocks(group.take_blocks(), len(parts)) == tuple(sorted(ranks[:count]))
        ranks = ranks[count:]
    assert parts_by_rank(whole.take_blocks(), len(parts)) == parts
    assert whole.take_blocks() == b""


@given(st.binary(max_size=80))
def test_nonsense_is_no_block(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        parts_by_rank(payload, 3)


@given(st.integers(0, 60), st.integers(0, 255))
def test_a_damaged_block_is_an_error_or_other_parts(at: int, byte: int) -> None:
    parts = Parts()
    for rank in range(3):
        parts.add(rank, bytes([rank] * rank))
    payload = bytearray(parts.take_blocks())
    payload[at % len(payload)] = byte
    with contextlib.suppress(ProtocolError):
        assert len(parts_by_rank(payload, 3)) == 3


def test_ranges_do_not_make_us_allocate() -> None:
    payload = struct.pack("!IIQ3I", 1, 1, 0, 0, 0xFFFFFFFF, 0)
    with pytest.raises(ProtocolError, match="ranks 0 to 4294967295 of 3"):
        parts_by_rank(payload, 3)

"""The control plane over a communicator: what it decides is what it decides over sockets (tests/control)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.comm.mpi.fake_mpi import FakeMpi
from tests.comm.mpi.ranks import in_threads, progresses

from farspan.comm.mpi import progress as moving_messages
from farspan.comm.mpi.progress import Progress
from farspan.comm.mpi.side import Port, open_ends
from farspan.comm.pulls.pulls import Pulls
from farspan.control.channel import SideChannel
from farspan.control.groups.group_channel import GroupChannel
from farspan.errors import DeadlineError, DivergenceError, RemoteError

LONG_S, SHORT_S = 100.0, 0.05


def opened(progress: Progress, size: int) -> SideChannel:
    link, hub = open_ends(Port(progress, 0, 0, size))
    return SideChannel(progress.rank, size, link, hub)


@contextmanager
def channels(num_ranks: int) -> Iterator[list[SideChannel]]:
    with progresses(FakeMpi(), num_ranks) as moving:
        made = [opened(progress, num_ranks) for progress in moving]
        yield made
        in_threads(num_ranks, lambda rank: made[rank].close(linger_s=5.0))


@pytest.mark.parametrize("num_ranks", [2, 40])
def test_ranks_agree_and_gather_whatever_the_tree(num_ranks: int) -> None:
    with channels(num_ranks) as sides:

        def run(rank: int) -> list[bytes]:
            side = sides[rank]
            for step in range(3):
                side.start(step, digest=7 + step)
                side.wait_agreed(step, LONG_S)
            side.contribute("part", b"%d" % rank)
            found = side.gathered("part", LONG_S)
            side.finish(LONG_S)
            return found

        assert in_threads(num_ranks, run) == [[b"%d" % rank for rank in range(num_ranks)]] * num_ranks


def test_an_exception_of_one_rank_reaches_all() -> None:
    with channels(34) as sides:

        def run(rank: int) -> str:
            if rank == 33:  # below a relay
                sides[rank].fail(ValueError("no such file"))
                return ""
            with pytest.raises(RemoteError, match="rank 33 failed: ValueError: no such file"):
                _wait(sides[rank])
            return "heard"

        assert in_threads(34, run) == ["heard"] * 33 + [""]


def _wait(side: SideChannel, deadline_s: float = LONG_S) -> None:
    side.start(0, digest=1)
    side.wait_agreed(0, deadline_s)


def test_programs_that_differ_and_one_that_ends_early() -> None:
    with channels(2) as sides:

        def run(rank: int) -> None:
            sides[rank].history = lambda step: [(rank, f"call {rank}")]
            sides[rank].start(0, digest=rank)
            with pytest.raises(DivergenceError, match="programs differ at step 0"):
                sides[rank].wait_agreed(0, LONG_S)

        in_threads(2, run)
    with channels(2) as sides:

        def end(rank: int) -> None:
            act = sides[rank].finish if rank else functools.partial(_wait, sides[rank])
            with pytest.raises(DivergenceError):
                act(LONG_S)

        in_threads(2, end)


def test_what_the_program_waits_for_is_looked_after_however_long_a_rank_that_computes_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moving_messages, "_ALONE", (LONG_S, LONG_S))
    with channels(2) as sides:
        pulls = [Pulls(side, lambda request: ({"asked": request["name"]}, []), LONG_S) for side in sides]

        def run(rank: int) -> list[bytes]:
            _wait(sides[rank])
            if rank == 1:  # the other one waits for the gather meanwhile
                assert pulls[1].pull(0, {"name": "x"})[0] == {"asked": "x"}
            sides[rank].contribute("part", b"%d" % rank)
            return sides[rank].gathered("part", LONG_S)

        assert in_threads(2, run, limit_s=0.5 * LONG_S) == [[b"0", b"1"]] * 2
        monkeypatch.undo()


def test_a_rank_that_is_late_is_known_to_have_connected() -> None:
    with channels(2) as sides, pytest.raises(DeadlineError, match="rank 1: has done nothing yet"):
        _wait(sides[0], SHORT_S)


def test_who_does_not_say_bye_is_not_waited_for_longer_than_was_said() -> None:
    with progresses(FakeMpi(), 2) as moving:
        _, hub = open_ends(Port(moving[0], 0, 0, 2))
        assert hub is not None
        assert in_threads(1, lambda rank: hub.wait_ended(SHORT_S), limit_s=10.0) == [False]
        hub.stop()
        assert hub.wait_ended(float("inf"))  # it has ended, whoever has said bye


def test_a_rank_asks_another_one() -> None:
    with channels(3) as sides:
        sides[2].serve(lambda request: {"twice": 2 * request["number"]})
        assert sides[1].request(2, {"number": 21}, LONG_S) == {"twice": 42}
        assert sides[2].request(2, {"number": 1}, LONG_S) == {"twice": 2}


def test_tensors_are_pulled_over_streams() -> None:
    large = torch.arange(3_000_000, dtype=torch.float32)
    with channels(2) as sides:
        pulls = [
            Pulls(side, lambda request: ({"asked": request["name"]}, [large, torch.tensor([True])]), LONG_S)
            for side in sides
        ]
        for _ in range(2):  # the second question goes over the first one's stream
            head, (first, second) = pulls[1].pull(0, {"name": "x"})
            assert head == {"asked": "x"}
            assert first.equal(large)
            assert second.tolist() == [True]
        assert sides[0].streams is not None


def test_a_question_that_cannot_be_answered_is_an_error_at_the_asker() -> None:
    def answer(request: dict[str, object]) -> tuple[dict[str, object], list[torch.Tensor]]:
        raise ValueError("no such tensor")

    with channels(2) as sides:
        pulls = [Pulls(side, answer, LONG_S) for side in sides]
        with pytest.raises(RemoteError, match="no such tensor"):
            pulls[0].pull(1, {"name": "y"})


def test_groups_have_side_channels_of_their_own() -> None:
    with progresses(FakeMpi(), 4) as moving:

        def run(rank: int) -> tuple[list[bytes], list[bytes]]:
            everybody = opened(moving[rank], 4)
            number = rank // 2
            link, hub = open_ends(Port(moving[rank], 1, 2 * number, 2))
            group = GroupChannel(everybody, number, 2, link, hub, secret="")
            group.contribute("of the group", b"%d" % rank)
            everybody.contribute("of all", b"%d" % rank)
            found = group.gathered("of the group", LONG_S), everybody.gathered("of all", LONG_S)
            group.finish(LONG_S)
            group.close(linger_s=5.0)
            return found

        found = in_threads(4, run)
    assert [of_group for of_group, _ in found] == [[b"0", b"1"], [b"0", b"1"], [b"2", b"3"], [b"2", b"3"]]
    assert {tuple(of_all) for _, of_all in found} == {(b"0", b"1", b"2", b"3")}

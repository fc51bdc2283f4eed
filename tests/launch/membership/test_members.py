"""Who goes on after a loss, as the launcher decides it."""

from __future__ import annotations

from farspan.launch.membership import Members


def members_of(*groups: int) -> Members:
    members = Members(len(groups))
    for rank, group in enumerate(groups):
        members.hear(rank, {"is": "member", "group": group, "num_groups": len(set(groups))})
    return members


def test_a_world_is_formed_when_all_that_are_left_are_ready() -> None:
    members = members_of(0, 0, 1, 1, 2, 2)
    goes_on, (over, lost) = members.lose(3, "was killed")
    assert goes_on and members.gone == {2, 3}
    assert (over.ranks, over.message["is"]) == ([2, 3], "over")
    assert (lost.ranks, lost.message["ranks"]) == ([0, 1, 4, 5], [2, 3])
    assert [members.hear(rank, {"is": "ready", "state": rank}) for rank in (5, 0, 4)] == [[], [], []]
    (world,) = members.hear(1, {"is": "ready", "state": 1})
    assert world.ranks == [0, 1, 4, 5]
    assert world.message == {"is": "world", "generation": 1, "ranks": [0, 1, 4, 5], "states": [0, 1, 4, 5]}


def test_a_rank_that_is_lost_while_others_wait_is_not_waited_for() -> None:
    members = members_of(0, 1, 2)
    members.lose(0, "was killed")
    members.hear(2, {"is": "ready", "state": 7})
    goes_on, (_, lost, world) = members.lose(1, "was killed")
    assert goes_on and lost.ranks == [2] and world.message["ranks"] == [2]


def test_the_last_group_is_not_lost_but_the_run() -> None:
    members = members_of(0, 1)
    assert members.lose(0, "was killed")[0]
    goes_on, (over,) = members.lose(1, "was killed")
    assert not goes_on and over.message["why"] == "rank 1 was killed, and no other group is left"
    assert members.gone == {0}
    assert members.hear(1, {"is": "ready", "state": 0})[0].message["is"] == "over"


def test_nothing_goes_on_before_all_have_said_where_they_belong() -> None:
    members = Members(2)
    members.hear(0, {"is": "member", "group": 0, "num_groups": 2})
    assert not members.lose(1, "was killed")[0] and "not divided into groups" in members.over


def test_ranks_that_wait_when_others_have_ended_well_are_over_too() -> None:
    members = members_of(0, 1, 2)
    members.lose(0, "was killed")
    members.hear(1, {"is": "ready", "state": 3})
    (world,) = members.leave(2)
    assert world.ranks == [1] and world.message["ranks"] == []


def test_mates_of_a_lost_rank_do_not_count_as_further_losses() -> None:
    members = members_of(0, 0, 1, 1)
    members.lose(0, "was killed")
    assert members.lose(1, "was killed") == (True, [])
    assert members.leave(1) == [] and members.staying == [2, 3]

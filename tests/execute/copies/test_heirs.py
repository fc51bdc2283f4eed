"""Who has copies of what, and who runs the stages that a lost rank has run."""

from __future__ import annotations

from farspan.execute.copies.heirs import heirs_of, places_without, teams_without
from farspan.plan import Team, Worker


def team(*ranks: int) -> Team:
    return Team(tuple(Worker(rank, "cpu") for rank in ranks))


def test_members_of_a_wide_stage_keep_copies_of_the_one_before() -> None:
    assert heirs_of([team(0, 2, 1), team(3)]) == {0: 2, 2: 1, 1: 0}
    assert heirs_of([team(0), team(0, 1), team(1, 2), team(2)]) == {0: 1, 1: 0, 2: 1}
    assert heirs_of([team(0), team(1)]) == {}
    assert heirs_of([Team((Worker(0, "cpu"), Worker(0, "cuda:0")))]) == {}  # both go with their rank


def test_stages_keep_their_numbers_and_ranks_get_new_ones() -> None:
    teams = [team(0, 1, 2), team(3), team(0), team(1), team(2)]
    left = teams_without(teams, [0, 2, 3], {1: 2})
    assert left == [team(0, 1), team(2), team(0), team(1), team(1)]
    assert teams_without(left, [1, 2], {0: 1}) == [team(0), team(1), team(0), team(0), team(0)]


def test_a_plan_names_the_ranks_that_are_left() -> None:
    assert places_without(["rank:0+rank:1", "rank:2", "rank:1/cpu"], [0, 2], {1: 0}) == (
        "rank:0",
        "rank:1",
        "rank:0/cpu",
    )

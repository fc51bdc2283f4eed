"""Which rank has copies of what another one owns, and which stages it takes over.

    plan       stage 0   rank:0+rank:1+rank:2      stage 1   rank:3
    heirs      0 -> 1, 1 -> 2, 2 -> 0              3 -> nobody
    without 1  stage 0   rank:0+rank:1             stage 1   rank:2      numbers have no gaps

Stages keep their numbers, so that what has been recorded stays what it is: only who runs them is another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farspan.plan import Place, Team, Worker, format_places, parse_places

__all__ = ["heirs_of", "places_without", "teams_without"]


def heirs_of(teams: Sequence[Team]) -> dict[int, int]:
    """Returns, for each rank that shares a wide stage, the member that keeps copies of what it owns: the next one.

    Args:
        teams: Who runs each stage.
    """
    heirs: dict[int, int] = {}
    for team in teams:
        ranks = list(dict.fromkeys(worker.rank for worker in team.members))
        if len(ranks) > 1:
            for rank, heir in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
                heirs.setdefault(rank, heir)
    return heirs


def teams_without(teams: Sequence[Team], left: Sequence[int], heirs: Mapping[int, int]) -> list[Team]:
    """Returns who runs each stage once some ranks are lost, by the new numbers of those that are left.

    Args:
        teams: Who ran it.
        left: The ranks that are left, ascending; their places here are their new numbers.
        heirs: For each rank that is lost one that is left.
    """
    number_of = {rank: number for number, rank in enumerate(left)}
    found: list[Team] = []
    for team in teams:
        members = [Worker(number_of[each.rank], each.device) for each in team.members if each.rank in number_of]
        leader = team.leader
        found.append(Team(tuple(members) or (Worker(number_of[heirs[leader.rank]], leader.device),)))
    return found


def places_without(stages: Sequence[str], left: Sequence[int], heirs: Mapping[int, int]) -> tuple[str, ...]:
    """Returns the places of a plan's stages, as people write them, once some ranks are lost; see `teams_without`."""
    number_of = {rank: number for number, rank in enumerate(left)}
    found: list[str] = []
    for text in stages:
        places = parse_places(text)
        members = [Place(rank=number_of[each.rank], device=each.device) for each in places if each.rank in number_of]
        first = places[0]
        heir = Place(rank=number_of[heirs[first.rank]], device=first.device) if not members else first
        found.append(format_places(tuple(members) or (heir,)))
    return tuple(found)

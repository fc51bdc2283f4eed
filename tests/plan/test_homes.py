"""The owners of what lies on stages of several members."""

from __future__ import annotations

from farspan.plan import Homes, Team, Worker

MEMBERS = (Worker(0, "cpu"), Worker(1, "cpu"))


def test_owners_have_equal_shares() -> None:
    """In the model's order a Llama block gave one of two ranks 30 of 49 MB: what was large came last."""
    sizes = {"q": 4, "k": 4, "v": 4, "o": 4, "gate": 11, "up": 11, "down": 11}
    homes = Homes([Team(MEMBERS)], dict.fromkeys(sizes, 0), sizes)
    loads = [sum(sizes[name] for name, owner in homes.owner.items() if owner == stage) for stage in (1, 2)]
    assert sorted(loads) == [23, 26]
    assert list(homes.owner) == list(sizes), "in the model's order"


def test_one_member_owns_all() -> None:
    homes = Homes([Team(MEMBERS[:1]), Team(MEMBERS[1:])], {"a": 0, "b": 1}, {"a": 1, "b": 9})
    assert homes.owner == {"a": 0, "b": 1}
    assert len(homes.teams) == 2
